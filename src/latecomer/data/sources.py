"""The data sources a run can name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latecomer.data.dataset import Dataset
from latecomer.data.mnist import read_mnist
from latecomer.data.npz import read_npz
from latecomer.errors import BadInput, unknown


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from, and whom to cite for it."""

    name: str
    summary: str
    citation: str
    needs_path: bool
    load: Callable[[Path | None], Dataset]


def load(source: str, path: str = "") -> Dataset:
    """The dataset of a named source.

    A relative path that does not exist is also looked up in the folder LATECOMER_DATA.
    """
    if source not in SOURCES:
        raise unknown("data source", source, SOURCES)
    if path and not SOURCES[source].needs_path:
        raise BadInput(f"data source {source!r} takes no path, but {path!r} is given; leave it out")
    return SOURCES[source].load(_resolve(path) if path else None)


def _resolve(path: str) -> Path:
    wanted = Path(os.path.expanduser(path))
    # os.path.exists, as Path.exists raises on names that the file system does not allow.
    if os.path.exists(wanted):
        return wanted
    root = os.environ.get("LATECOMER_DATA", "")
    if root and not wanted.is_absolute():
        inside = Path(root) / wanted
        if os.path.exists(inside):
            return inside
        raise BadInput(f"{wanted}: no such file or folder, nor is {inside} (LATECOMER_DATA)")
    raise BadInput(f"{wanted}: no such file or folder; expected the path of the data")


def _from_path(name: str, read: Callable[[Path], Dataset]) -> Callable[[Path | None], Dataset]:
    def load_path(path: Path | None) -> Dataset:
        if path is None:
            raise BadInput(f"data source {name!r} needs a path; give the file or folder to read")
        return read(path)

    return load_path


def _digits(path: Path | None) -> Dataset:
    # scikit-learn takes a second to import, and only this source needs it.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Dataset(
        x=(bunch.images[:, np.newaxis] / 16).astype(np.float32),
        y=bunch.target,
        class_names=tuple(str(name) for name in bunch.target_names),
        where="digits",
    )


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="digits",
            summary="1,797 handwritten digits of 8 x 8 pixels, shipped with scikit-learn",
            citation="E. Alpaydin, C. Kaynak. Optical Recognition of Handwritten Digits. "
            "UCI Machine Learning Repository, 1998.",
            needs_path=False,
            load=_digits,
        ),
        Source(
            name="npz",
            summary="your own .npz file: x, y, and optionally subject, test, class_names",
            citation="",
            needs_path=True,
            load=_from_path("npz", read_npz),
        ),
        Source(
            name="mnist",
            summary="70,000 handwritten digits of 28 x 28 pixels: idx files or mnist.npz",
            citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning "
            "applied to document recognition. Proceedings of the IEEE 86(11), 1998.",
            needs_path=True,
            load=_from_path("mnist", read_mnist),
        ),
    )
}

"""The registry of data sources that `data.source` can name."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latecomer.data.dataset import Dataset, SourceOptions
from latecomer.data.extrasensory import read_extrasensory
from latecomer.data.frames import read_csv, read_parquet
from latecomer.data.images import read_folder
from latecomer.data.mnist import read_mnist
from latecomer.data.npz import read_npz
from latecomer.data.pamap2 import read_pamap2
from latecomer.data.uci_har import read_uci_har
from latecomer.data.watch import read_watch
from latecomer.errors import BadInput, unknown


@dataclass(frozen=True)
class Source:
    """A named dataset: description, reference, reader, and the `SourceOptions` that it accepts."""

    name: str
    summary: str
    paper: str
    needs_path: bool
    read: Callable[[Path, SourceOptions], Dataset]  # the path is empty unless it is needed
    options: tuple[str, ...] = ()


def load_dataset(source: str, path: str = "", options: SourceOptions | None = None) -> Dataset:
    """The dataset of a source; an option that the source does not have raises BadInput.

    A relative path that does not exist is looked up in the folder LATECOMER_DATA.
    """
    options = options or SourceOptions()
    if source not in SOURCES and os.path.exists(source):
        raise BadInput(
            f"data source {source!r} is a file or folder; give its kind as data.source ("
            f"{', '.join(name for name in SOURCES if SOURCES[name].needs_path)}) and its path as"
            " data.path"
        )
    if source not in SOURCES:
        raise unknown("data source", source, SOURCES, "your own as module:callable")
    if path and not SOURCES[source].needs_path:
        raise BadInput(f"data source {source!r} takes no path, but {path!r} is given; remove it")
    if not path and SOURCES[source].needs_path:
        raise BadInput(f"data source {source!r} needs a path; give the file or folder as data.path")
    for key in options.given:
        if key not in SOURCES[source].options:
            options_here = ", ".join(f"data.{name}" for name in SOURCES[source].options)
            allowed = f"allowed: {options_here}" if options_here else "it has no options"
            others = ", ".join(each.name for each in SOURCES.values() if key in each.options)
            raise BadInput(
                f"data source {source!r} has no option data.{key}; {allowed} (data.{key} is for"
                f" {others})"
            )
    return SOURCES[source].read(_resolve(path) if path else Path(), options)


def _resolve(path: str) -> Path:
    wanted = Path(os.path.expanduser(path))
    # Not Path.exists, which raises on names that the file system does not allow.
    if os.path.exists(wanted):
        return wanted
    root = os.environ.get("LATECOMER_DATA", "")
    if root and not wanted.is_absolute():
        inside = Path(root) / wanted
        if os.path.exists(inside):
            return inside
        raise BadInput(f"{wanted}: no such file or folder, nor is {inside} (LATECOMER_DATA)")
    raise BadInput(f"{wanted}: no such file or folder; expected the path of the data")


def _digits(path: Path, options: SourceOptions) -> Dataset:
    # Imported here: scikit-learn takes a second to import, and only this source needs it.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return Dataset(
        x=(bunch.images[:, np.newaxis] / 16).astype(np.float32),
        y=bunch.target,
        class_names=tuple(str(name) for name in bunch.target_names),
        where="digits",
    )


TABLE_OPTIONS = ("target", "subject", "columns", "ignore")

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            name="digits",
            summary="1,797 handwritten digits of 8 x 8 pixels, shipped with scikit-learn",
            paper="E. Alpaydin, C. Kaynak. Optical Recognition of Handwritten Digits. "
            "UCI Machine Learning Repository, 1998.",
            needs_path=False,
            read=_digits,
        ),
        Source(
            name="npz",
            summary="an .npz file of yours: x, y, and optionally subject, test, class_names",
            paper="",
            needs_path=True,
            read=lambda path, options: read_npz(path),
        ),
        Source(
            name="csv",
            summary="a table of yours: data.target names the column to predict, data.subject the "
            "one of devices",
            paper="",
            needs_path=True,
            read=read_csv,
            options=TABLE_OPTIONS,
        ),
        Source(
            name="parquet",
            summary="the same from a parquet file; needs pyarrow",
            paper="",
            needs_path=True,
            read=read_parquet,
            options=TABLE_OPTIONS,
        ),
        Source(
            name="folder",
            summary="images of yours, one folder per class, or per device and class; needs Pillow",
            paper="",
            needs_path=True,
            read=read_folder,
            options=("size", "variant"),
        ),
        Source(
            name="mnist",
            summary="70,000 handwritten digits of 28 x 28 pixels: idx files or mnist.npz",
            paper="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning "
            "applied to document recognition. Proceedings of the IEEE 86(11), 1998.",
            needs_path=True,
            read=lambda path, options: read_mnist(path),
        ),
        Source(
            name="uci-har",
            summary="10,299 windows of a waist-worn smartphone, 30 subjects, 6 activities",
            paper="D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz. A Public Domain "
            "Dataset for Human Activity Recognition Using Smartphones. ESANN 2013.",
            needs_path=True,
            read=read_uci_har,
            options=("variant",),
        ),
        Source(
            name="extrasensory",
            summary="phone and watch features recorded in daily life, one file per user",
            paper="Y. Vaizman, K. Ellis, G. Lanckriet. Recognizing Detailed Human Context "
            "In-the-Wild from Smartphones and Smartwatches. IEEE Pervasive Computing 16(4), 2017.",
            needs_path=True,
            read=read_extrasensory,
            options=("sensors", "label"),
        ),
        Source(
            name="pamap2",
            summary="3 inertial units and heart rate at 100 Hz, 9 subjects, 18 activities",
            paper="A. Reiss, D. Stricker. Introducing a New Benchmarked Dataset for Activity "
            "Monitoring. ISWC 2012.",
            needs_path=True,
            read=read_pamap2,
            options=("variant", "sensors", "activities", "length", "step"),
        ),
        Source(
            name="watch",
            summary="smartwatch at 50 Hz, 10 subjects, 7 shoulder exercises; needs seglearn",
            paper="D. Burns, N. Leung, M. Hardisty, C. Whyne, P. Henry, S. McLachlin. Shoulder "
            "physiotherapy exercise recognition. Physiological Measurement 39(7), 2018.",
            needs_path=False,
            read=lambda path, options: read_watch(options),
            options=("length", "step"),
        ),
    )
}

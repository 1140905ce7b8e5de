"""Reader of arrays x, y, and optionally subject, test, class_names: an .npz or a folder of .npy."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset
from latecomer.errors import BadInput

Array = NDArray[Any]


KEYS = ("x", "y", "subject", "test", "class_names")


def read_npz(path: Path) -> Dataset:
    """The dataset in `path`; of a folder with x.npy, y.npy, ... the inputs stay on disk."""
    found = _mapped(path) if path.is_dir() else read_arrays(path, KEYS)
    for key in ("x", "y"):
        if key not in found:
            files = " in x.npy and y.npy" if path.is_dir() else ""
            raise BadInput(f"{path}: the array {key!r} is missing; expected x and y{files}")
    return Dataset(
        x=found["x"],
        y=found["y"],
        subject=found.get("subject"),
        test=found.get("test"),
        class_names=_names(path, found.get("class_names")),
        where=str(path),
    )


def _mapped(folder: Path) -> dict[str, Array]:
    """The arrays of a folder, each in a file of its name; x is memory-mapped."""
    found = {}
    for key in KEYS:
        if (path := folder / f"{key}.npy").is_file():
            try:
                found[key] = np.load(path, mmap_mode="r" if key == "x" else None)
            except (OSError, ValueError, EOFError) as error:
                raise BadInput(f"{path}: {_reason(key, error)}") from None
    return found


def read_arrays(path: Path, wanted: Iterable[str]) -> dict[str, Array]:
    """Those of the wanted arrays that are in the file; other arrays are not loaded."""
    if path.is_dir():
        raise BadInput(f"{path}: is a folder; expected an .npz file")
    key = ""
    try:
        # Opened here, because numpy does not close its handle when the archive is damaged.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadInput(f"{path}: holds a single array; expected an .npz with x and y")
            with archive:
                found = {}
                for key in wanted:
                    if key in archive.files:
                        found[key] = archive[key]
    except BadInput:
        raise
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; expected an .npz file") from None
    # zipfile, zlib and numpy's header parser raise many exception types; each means a bad file.
    except Exception as error:
        raise BadInput(f"{path}: {_reason(key, error)}") from None
    for key, value in found.items():
        if not isinstance(value, np.ndarray):
            raise BadInput(f"{path}: {key!r} is not an array; expected an intact .npz file")
    return found


def _reason(key: str, error: Exception) -> str:
    if "allow_pickle" in str(error) or "Python objects" in str(error):
        if not key:
            return "is not an .npz file; expected an .npz file with x and y"
        return f"the array {key!r} holds pickled objects; expected plain numbers or text"
    part = f"the array {key!r}" if key else "the file"
    detail = (str(error).splitlines() or [type(error).__name__])[0]
    return f"cannot read {part} ({detail}); expected an intact .npz file"


def _names(path: Path, names: Array | None) -> tuple[str, ...]:
    if names is None:
        return ()
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise BadInput(f"{path}: class_names is {names.dtype} {names.shape}; expected (k,) text")
    return tuple(
        name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        for name in names.tolist()
    )

"""Text tables of numbers as datasets publish them, read with errors that say where."""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.errors import BadInput


def folder_holding(path: Path, name: str, what: str) -> Path:
    """`path` itself or a folder in it, whichever holds the file or folder `name`."""
    if not path.is_dir():
        raise BadInput(f"{path}: is a file; expected the folder of {what}")
    for folder in (path, *sorted(each for each in path.iterdir() if each.is_dir())):
        if (folder / name).exists():
            return folder
    raise BadInput(f"{path}: {name} is not here; expected the folder of {what}")


def reading(path: Path, read: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """What `read` gives; whatever is wrong with the file is said in one line."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    try:
        return read()
    except (OSError, ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise BadInput(f"{path}: cannot be read ({reason}); is it truncated?") from None


def numbers(path: Path, columns: int) -> NDArray[np.float32]:
    """A table of numbers without a header, separated by white space, none missing."""
    table = reading(
        path, lambda: pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32, na_filter=True)
    )
    if table.shape[1] != columns:
        raise BadInput(f"{path}: {table.shape[1]} values in a row; expected {columns}")
    values = table.to_numpy()
    gaps = np.isnan(values).any(axis=1)
    if gaps.any():
        raise BadInput(
            f"{path}: row {int(gaps.argmax()) + 1} has fewer than {columns} numbers;"
            " is the file truncated?"
        )
    return values


def whole_numbers(path: Path) -> NDArray[np.int64]:
    """One whole number per line."""
    values = numbers(path, 1)[:, 0]
    whole = values.astype(np.int64)
    if (wrong := whole != values).any():
        row = int(wrong.argmax())
        raise BadInput(f"{path}: row {row + 1} is {values[row]:g}; expected a whole number")
    return whole

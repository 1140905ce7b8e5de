"""Readers of text tables of numbers; errors name the file and the row."""

import gzip
import zlib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.errors import BadInput, unknown


def find_folder(path: Path, name: str, dataset: str) -> Path:
    """The folder that contains `name`: `path` or a direct subfolder of it."""
    if not path.is_dir():
        raise BadInput(f"{path}: is a file; expected the folder of {dataset}")
    for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        if (folder / name).exists():
            return folder
    raise BadInput(f"{path}: there is no {name}; expected the folder of {dataset}")


def check_names(option: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """BadInput if a given name is not allowed."""
    for name in given:
        if name not in allowed:
            raise unknown(option, name, allowed)


def read_table(path: Path, read: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """The result of `read`; an unreadable file raises BadInput with a one-line reason."""
    if not path.exists():
        raise BadInput(f"{path}: no such file")
    try:
        return read()
    except pd.errors.EmptyDataError:
        raise BadInput(
            f"{path}: the file is empty; expected a table, one example per row"
        ) from None
    except (OSError, ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise BadInput(f"{path}: cannot be read ({reason}); is it truncated?") from None


def read_numbers(path: Path, columns: int) -> NDArray[np.float32]:
    """(rows, columns): a complete table of numbers without header, separated by white space."""
    table = read_table(
        path, lambda: pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32, na_filter=True)
    )
    if table.shape[1] != columns:
        raise BadInput(f"{path}: {table.shape[1]} values in a row; expected {columns}")
    values = table.to_numpy()
    incomplete = np.isnan(values).any(axis=1)
    if incomplete.any():
        raise BadInput(
            f"{path}: row {int(incomplete.argmax()) + 1} has fewer than {columns} numbers;"
            " is the file truncated?"
        )
    return values


def read_integers(path: Path) -> NDArray[np.int64]:
    """(rows,): one integer per line."""
    values = read_numbers(path, 1)[:, 0]
    integers = values.astype(np.int64)
    if (wrong := integers != values).any():
        row = int(wrong.argmax())
        raise BadInput(f"{path}: row {row + 1} is {values[row]:g}; expected an integer")
    return integers

"""Inputs that are not copied into memory: read by row number from a file or from an object."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

IN_MEMORY_BYTES = 2**30  # sources that can do both read up to this many bytes of inputs at once
ROWS_AT_ONCE = 1024  # in one step over all rows


@dataclass(frozen=True, eq=False)
class StoredInputs:
    """Inputs (n, ...) of float32 or int64; `read` returns the rows of the given numbers."""

    read: Callable[[Indices], NDArray[Any]]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return self.read(np.arange(len(self))[rows])

    def select(self, rows: Any) -> "StoredInputs":
        """The inputs of some rows, in that order, still to be read."""
        chosen = np.arange(len(self))[rows]
        return StoredInputs(
            lambda wanted: self.read(chosen[wanted]), (len(chosen), *self.shape[1:]), self.dtype
        )

    def converted(self, convert: Callable[[NDArray[Any]], NDArray[Any]]) -> "StoredInputs":
        """The inputs after a conversion row by row."""
        first = convert(self[:1])
        return StoredInputs(
            lambda rows: convert(self.read(rows)), (len(self), *first.shape[1:]), first.dtype
        )


Inputs = NDArray[Any] | StoredInputs  # float32, or int64 for tokens


def select(x: Inputs, rows: Any) -> Inputs:
    """Some rows of the inputs; stored inputs are not read."""
    return x.select(rows) if isinstance(x, StoredInputs) else x[rows]


def in_steps(x: Inputs) -> Iterator[NDArray[Any]]:
    """All rows in order, ROWS_AT_ONCE at a time."""
    for begin in range(0, len(x), ROWS_AT_ONCE):
        yield x[begin : begin + ROWS_AT_ONCE]


def mapped(array: NDArray[Any]) -> StoredInputs:
    """A memory-mapped array, of which only the rows that are read come into memory."""
    return StoredInputs(lambda rows: np.asarray(array[rows]), array.shape, array.dtype)


def concatenated(parts: list[Inputs]) -> Inputs:
    """The rows of all parts, in order; stored inputs are not read."""
    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, StoredInputs) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    starts = np.cumsum([0, *map(len, parts)])

    def read(rows: Indices) -> NDArray[Any]:
        found = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        of = np.searchsorted(starts, rows, side="right") - 1
        for number in np.unique(of).tolist():
            found[of == number] = parts[number][rows[of == number] - starts[number]]
        return found

    return StoredInputs(read, (int(starts[-1]), *parts[0].shape[1:]), parts[0].dtype)

"""Data given as Python objects, by `latecomer.run(data=...)` or by a function of the user's.

One dataset is `(x, y)` arrays or tensors, a `torch.utils.data.Dataset` of the map style, a pandas
frame, or a dataset of the package `datasets`. A list holds one dataset per device. A mapping with
"train" and "test" adds a central test set.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions, as_array
from latecomer.data.frames import contents
from latecomer.data.stored import (
    IN_MEMORY_BYTES,
    Indices,
    Inputs,
    StoredInputs,
    concatenated,
    mapped,
)
from latecomer.errors import BadInput, did_you_mean
from latecomer.loading import first_line, load_callable

SAMPLED_ROWS = 64  # of stored inputs, for the fingerprint
ALLOWED = "(x, y), a map-style torch Dataset, a pandas frame, or a dataset of `datasets`"


@dataclass(frozen=True)
class GivenData:
    """A dataset, and how it is partitioned and tested if that is part of what was given."""

    dataset: Dataset
    partition: str = ""  # by-subject: one dataset per device
    test: str = ""  # official: a central test set

    def fingerprint(self) -> str:
        """sha256 of types, shapes and values; of stored inputs SAMPLED_ROWS rows count."""
        data = self.dataset
        x = data.x
        if isinstance(x, StoredInputs):
            x = x[np.linspace(0, len(x) - 1, min(len(x), SAMPLED_ROWS)).astype(np.int64)]
        found = hashlib.sha256(repr((data.x.shape, data.class_names)).encode())
        for array in (x, data.y, data.subject, data.test):
            if array is not None:
                found.update(f"{array.dtype} {array.shape}".encode())
                found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def load_given(name: str, options: SourceOptions, path: str, seed: int) -> GivenData:
    """The data that the user's `module:callable` returns; it may take `path` and `seed`."""
    make = load_callable(name, "data source")
    code = getattr(make, "__code__", None)
    wanted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if path and "path" not in wanted:
        raise BadInput(f"data source {name!r} takes no path, but {path!r} is given; remove it")
    offered = {"path": path, "seed": seed}
    try:
        made = make(**{key: value for key, value in offered.items() if key in wanted})
    except BadInput:
        raise
    except Exception as error:  # whatever a user's function raises
        raise BadInput(f"data source {name!r} failed: {first_line(error)}") from error
    return from_objects(made, options, f"data source {name!r}")


def from_objects(given: object, options: SourceOptions, where: str = "data") -> GivenData:
    """The data in the user's objects; see the module."""
    if isinstance(given, GivenData):
        return given
    train, test = _train_and_test(given, where)
    each = list(train) if isinstance(train, list) else [train]
    if not each:
        raise BadInput(f"{where}: the list has no device; expected one dataset per device")
    several = isinstance(train, list)
    names = [f"{where}: device {i}" for i in range(len(each))] if several else [where]
    parts = [(part, name) for part, name in zip(each, names, strict=True)]
    if test is not None:
        parts.append((test, f"{where}: the test set"))
    read = _together(parts, options, where)
    sizes = [len(part.y) for part in read]
    for size, (_, name) in zip(sizes, parts, strict=True):
        if not size:
            raise BadInput(f"{name} has no examples; expected at least one")
    subject = np.repeat(np.arange(len(parts)), sizes) if several else _joined_subjects(read)
    dataset = Dataset(
        x=concatenated([part.x for part in read]),
        y=np.concatenate([part.y for part in read]),
        subject=subject,
        test=None if test is None else np.arange(sum(sizes)) >= sum(sizes) - sizes[-1],
        class_names=read[0].names,
        notes=tuple(dict.fromkeys(note for part in read for note in part.notes)),
        where=where,
    )
    return GivenData(dataset, "by-subject" if several else "", "" if test is None else "official")


@dataclass(frozen=True, eq=False)
class _Part:
    """The arrays of one given dataset, before labels become numbers."""

    x: Inputs
    y: NDArray[Any]
    subject: NDArray[Any] | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _train_and_test(given: object, where: str) -> tuple[object, object]:
    if not isinstance(given, Mapping):
        return given, None
    for key in given:
        if key not in ("train", "test"):
            hint = did_you_mean(str(key), ("train", "test"))
            raise BadInput(f"{where}: {key!r} is unknown{hint} (allowed: train, test)")
    if "train" not in given:
        raise BadInput(f"{where}: 'train' is missing; expected {{'train': ..., 'test': ...}}")
    return given["train"], given.get("test")


def _together(
    parts: Sequence[tuple[object, str]], options: SourceOptions, where: str
) -> list[_Part]:
    """All parts in arrays of equal types; tables are encoded together."""
    frames = [_as_frame(part, options, name) for part, name in parts]
    if all(frame is not None for frame in frames):
        whole = pd.concat([frame for frame in frames if frame is not None], ignore_index=True)
        found = contents(whole, options, where)
        of = np.repeat(np.arange(len(parts)), [len(f) for f in frames if f is not None])
        of = of[found.kept]
        return [
            _Part(
                found.x[of == i],
                found.y[of == i],
                None if found.subject is None else found.subject[of == i],
                found.target_names,
                found.notes,
            )
            for i in range(len(parts))
        ]
    read = [_read(part, options, name) for part, name in parts]
    first = read[0]
    for part, (_, name) in zip(read, parts, strict=True):
        for what, mine, theirs in (("x", part.x, first.x), ("y", part.y, first.y)):
            kinds = {"i": "integers", "u": "integers", "f": "floats", "U": "text"}
            kind, wanted = (kinds.get(a.dtype.kind, str(a.dtype)) for a in (mine, theirs))
            if mine.shape[1:] != theirs.shape[1:] or kind != wanted:
                raise BadInput(
                    f"{name}: {what} has {kind} of shape {_rows(mine.shape)}, the first one"
                    f" {wanted} of {_rows(theirs.shape)}; expected equal ones"
                )
    return read


def _rows(shape: tuple[int, ...]) -> str:
    return f"(n, {', '.join(map(str, shape[1:]))})" if len(shape) > 1 else "(n,)"


def _joined_subjects(parts: Sequence[_Part]) -> NDArray[Any] | None:
    if parts[0].subject is None:
        return None
    # The test set is on no device: its subjects do not matter.
    rest = [np.resize(parts[0].subject[:1], len(part.y)) for part in parts[1:]]
    return np.concatenate([parts[0].subject, *rest])


def _as_frame(given: object, options: SourceOptions, where: str) -> pd.DataFrame | None:
    """The pandas frame, or a dataset of `datasets` with several columns of inputs as a frame."""
    if isinstance(given, pd.DataFrame):
        return given
    if not _has_columns(given):
        return None
    if len(_input_columns(given, options, where)) == 1:
        return None
    frame: pd.DataFrame = given.to_pandas()  # type: ignore[attr-defined]
    return frame


def _has_columns(given: object) -> bool:
    """Whether it is a dataset of the package `datasets`, which need not be installed."""
    return all(hasattr(given, name) for name in ("column_names", "features", "to_pandas"))


def _input_columns(given: Any, options: SourceOptions, where: str) -> list[str]:
    known = list(given.column_names)
    target = options.target
    for name in (target,) if isinstance(target, str) else target:
        if name not in known:
            raise BadInput(
                f"{where}: no column {name!r} for data.target{did_you_mean(name, known)}"
                f" (columns: {', '.join(known)})"
            )
    left_out = {*((target,) if isinstance(target, str) else target), *options.ignore}
    return [n for n in options.columns or known if n not in left_out and n != options.subject]


def _read(given: Any, options: SourceOptions, where: str) -> _Part:
    """One dataset that is not a table."""
    if isinstance(given, Dataset):
        names = given.class_names
        return _Part(given.x, given.y, given.subject, names, given.notes)
    if isinstance(given, tuple) and len(given) == 2:
        return _part(where, *given)
    tensors = getattr(given, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return _part(where, *tensors)
    if isinstance(given, torch.utils.data.IterableDataset):
        raise BadInput(f"{where}: an IterableDataset has no row numbers; expected {ALLOWED}")
    if isinstance(given, str):
        raise BadInput(
            f"{where}: is the text {given!r}; a dataset by name is data.source in the config, here"
            f" expected {ALLOWED}"
        )
    no_items = not (hasattr(given, "__getitem__") and hasattr(given, "__len__"))
    if no_items or isinstance(given, np.ndarray | torch.Tensor | bytes | tuple):
        raise BadInput(f"{where}: is a {type(given).__name__}; expected {ALLOWED}")
    return _Items(given, options, where).read()


def _part(where: str, x: object, y: object) -> _Part:
    x, y = (_from_tensor(values) for values in (x, y))
    targets = as_array(where, "y", y)
    if isinstance(x, np.memmap):
        return _Part(mapped(x), targets)
    inputs = as_array(where, "x", x)
    if inputs.ndim and targets.ndim and len(inputs) != len(targets):
        raise BadInput(
            f"{where}: x has {len(inputs)} rows and y has {len(targets)}; expected equal numbers"
        )
    return _Part(inputs, targets)


def _from_tensor(values: object) -> object:
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


class _Items:
    """Reads a dataset item by item: `(x, y)`, or a mapping with the columns of the options.

    Every item is read with torch's random stream seeded by its row, so that random transforms give
    the same example each time.
    """

    def __init__(self, items: Any, options: SourceOptions, where: str) -> None:
        self._items, self._options, self._where = items, options, where
        if not len(items):
            raise BadInput(f"{where} has no examples; expected at least one")
        self._first = self._item(0)

    def read(self) -> _Part:
        """All examples; inputs of more than IN_MEMORY_BYTES stay in the dataset."""
        x, rows = self._first[0], range(len(self._items))
        if 4 * x.size * len(rows) > IN_MEMORY_BYTES:
            shape, dtype = (len(rows), *x.shape), x.dtype
            y, subject = self._targets([self._item(row)[1:] for row in rows])
            return _Part(StoredInputs(self._inputs, shape, dtype), y, subject, self._names())
        items = [self._item(row) for row in rows]
        y, subject = self._targets([item[1:] for item in items])
        return _Part(np.stack([item[0] for item in items]), y, subject, self._names())

    def _targets(
        self, found: Sequence[tuple[Any, Any]]
    ) -> tuple[NDArray[Any], NDArray[Any] | None]:
        y = as_array(self._where, "y", [target for target, _ in found])
        named = bool(self._options.subject) and found[0][1] is not None
        return y, np.asarray([subject for _, subject in found]) if named else None

    def _names(self) -> tuple[str, ...]:
        """The names of the classes, where `datasets` has them."""
        features = getattr(self._items, "features", None)
        if not isinstance(features, Mapping) or not isinstance(self._options.target, str):
            return ()
        return tuple(getattr(features.get(self._options.target), "names", None) or ())

    def _inputs(self, rows: Indices) -> NDArray[Any]:
        return np.stack([self._item(row)[0] for row in rows.tolist()])

    def _item(self, row: int) -> tuple[NDArray[Any], Any, Any]:
        """Input, target and subject of one example."""
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(row)
                item = self._items[row]
        except Exception as error:  # whatever a user's dataset raises
            raise BadInput(f"{self._where}: example {row}: {first_line(error)}") from error
        x, y, subject = self._split(item, row)
        values = _pixels(_from_tensor(x))
        try:
            array = np.asarray(values)
        except ValueError:
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "fiub":
            raise BadInput(
                f"{self._where}: the input of example {row} is a {type(x).__name__}; expected"
                " numbers (tokenise text before)"
            )
        first = self._first[0].shape if row else array.shape
        if array.shape != first:
            raise BadInput(
                f"{self._where}: example {row} has shape {array.shape}, example 0 {first};"
                " expected equal ones"
            )
        target = _from_tensor(y)
        return array, target.tolist() if isinstance(target, np.ndarray) else target, subject

    def _split(self, item: Any, row: int) -> tuple[Any, Any, Any]:
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1], None
        if not isinstance(item, Mapping):
            kind = f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else item
            raise BadInput(
                f"{self._where}: example {row} is a {kind}; expected (x, y), or a mapping"
            )
        target, known = self._options.target, [str(key) for key in item]
        if not isinstance(target, str) or target not in item:
            raise BadInput(
                f"{self._where}: no column {target!r} for data.target"
                f"{did_you_mean(str(target), known)} (columns: {', '.join(known)})"
            )
        left_out = {target, self._options.subject, *self._options.ignore}
        inputs = [name for name in self._options.columns or known if name not in left_out]
        if len(inputs) != 1 or inputs[0] not in item:
            raise BadInput(
                f"{self._where}: the inputs would be the columns {', '.join(inputs) or 'none'};"
                " name one with data.columns"
            )
        return item[inputs[0]], item[target], item.get(self._options.subject)


def _pixels(x: object) -> object:
    """An image of Pillow as an array (h, w) or (channels, h, w); others unchanged."""
    if not hasattr(x, "getbands"):
        return x
    array = np.asarray(x)
    return array if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))

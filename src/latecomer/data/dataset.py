"""A dataset, validated on construction."""

from dataclasses import InitVar, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.stored import Inputs, StoredInputs, in_steps, mapped, select
from latecomer.errors import BadInput

MAX_CLASSES = 100_000  # without class names; rejects columns of ids

Targets = NDArray[Any]  # int64 or float32


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs and targets of n examples; NaN in `x` is a missing value.

    `x` is (n, features), (n, time, channels), (n, channels, height, width) or more; float32,
    or int64 if integers (tokens) are given. uint8 images, (n, h, w) or (n, c, h, w), are divided by
    255. A memory-mapped array and `StoredInputs` are not copied into memory. `y` depends on what is
    given:

    - (n,) integers, bool or text are labels: int64 indices into `class_names`, which without names
      are the different labels in ascending order.
    - floats of any shape are numbers to predict, or (n, k) of 0, 1 and NaN the presence of k labels
      (NaN: unknown): float32. `class_names` may name the k labels.
    - integers of more axes, such as (n, time) tokens: int64.

    Invalid arrays raise BadInput with `where` as the prefix.
    """

    x: Inputs
    y: Targets
    subject: NDArray[np.generic] | None = None  # the person or device that recorded each example
    test: NDArray[np.bool_] | None = None  # the official test rows
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # messages to the user: rows and classes left out when reading
    where: InitVar[str] = "data"

    def __post_init__(self, where: str) -> None:
        y, names = _targets(where, self.y, tuple(str(name) for name in self.class_names))
        for field, value in {
            "x": _inputs(where, self.x, len(y)),
            "y": y,
            "subject": _subjects(where, self.subject, len(y)),
            "test": _test_mask(where, self.test, len(y)),
            "class_names": names,
        }.items():
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.y)

    def with_float_inputs(self) -> "Dataset":
        """The same with inputs in float32."""
        if self.x.dtype.kind == "f":
            return self
        if isinstance(self.x, StoredInputs):
            return replace(self, x=self.x.converted(lambda x: x.astype(np.float32)))
        return replace(self, x=self.x.astype(np.float32))

    @property
    def has_classes(self) -> bool:
        """Whether the target of an example is one of several classes."""
        return is_label(self.y)

    @property
    def extreme_tokens(self) -> NDArray[np.int64] | None:
        """The examples with the largest and the smallest token, (2, ...).

        None if inputs are numbers or are stored.
        """
        if self.x.dtype.kind != "i" or isinstance(self.x, StoredInputs):
            return None
        tokens = self.x.reshape(len(self.x), -1)
        return self.x[[tokens.max(1).argmax(), tokens.min(1).argmin()]]

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 if targets are not classes."""
        return len(self.class_names) if self.has_classes else 0

    @property
    def num_outputs(self) -> int:
        """The outputs that a model needs: classes, numbers per example, or different tokens."""
        if self.has_classes:
            return self.num_classes
        if self.y.dtype.kind == "f":
            return int(np.prod(self.y.shape[1:]))
        tokens = max(int(x.max()) for x in in_steps(self.x)) if self.x.dtype.kind == "i" else 0
        return max(tokens, int(self.y.max())) + 1


def is_label(y: Any) -> bool:
    """Whether targets (an array or a tensor) are labels: one integer per example."""
    return bool(y.ndim == 1 and not str(y.dtype).endswith(("float32", "float64")))


def describe_target(y: Any) -> str:
    """The kind and shape of targets (an array or a tensor) in a few words."""
    if is_label(y):
        return "class labels"
    kind = "numbers" if "float" in str(y.dtype) else "integers"
    return f"{kind} of shape ({', '.join(['n', *map(str, y.shape[1:])])})"


def need_classes(y: Any, key: str, allowed: str) -> None:
    """BadInput unless targets are labels, which the setting `key` needs."""
    if not is_label(y):
        raise BadInput(f"{key} needs class labels, but targets are {describe_target(y)}; {allowed}")


def feature_axis(ndim: int) -> int:
    """The axis of the features: columns of a table, channels of a series or of an image."""
    return 1 if ndim >= 4 else ndim - 1


def as_array(where: str, name: str, given: object) -> NDArray[Any]:
    """`given` as an array; BadInput if its rows differ in length or it is no array of values."""
    try:
        array = np.asarray(given)
    except ValueError:
        raise BadInput(f"{where}: rows of {name} differ in length; expected equal ones") from None
    if array.dtype.kind == "O" and array.size:
        if all(isinstance(value, str) for value in array.flat):
            return array.astype(np.str_)
        odd = next(value for value in array.flat if not isinstance(value, str))
        raise BadInput(
            f"{where}: {name} holds a {type(odd).__name__}; expected numbers"
            + (" or text" if name == "y" else "")
        )
    return array


def _targets(where: str, given: object, names: tuple[str, ...]) -> tuple[Targets, tuple[str, ...]]:
    """The targets in their final type, and the class names."""
    y = as_array(where, "y", given)
    if y.ndim == 0:
        raise BadInput(f"{where}: y is a single value; expected one target per example")
    if len(y) == 0:
        raise BadInput(f"{where}: there are no examples; expected at least 2")
    if y.dtype.kind not in "iubUSf":
        raise BadInput(f"{where}: y is {y.dtype}; expected integers, text or floats")
    if y.size == 0:
        raise BadInput(f"{where}: y has shape {y.shape}; expected at least one value per example")
    if y.ndim == 2 and y.shape[1] == 1 and y.dtype.kind != "f":
        y = y[:, 0]
    if y.dtype.kind == "f" or (y.ndim > 1 and y.dtype.kind == "b"):
        return _numbers(where, y), _names_of_outputs(where, y, names)
    if y.ndim > 1:
        if y.dtype.kind not in "iu":
            raise BadInput(f"{where}: y is text of shape {y.shape}; expected (n,) labels")
        return y.astype(np.int64), ()
    return _labels(where, y, names)


def _numbers(where: str, y: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        y = y.astype(np.float32)
    missing = np.isnan(y)
    if missing.all():
        raise BadInput(f"{where}: every target is missing; expected numbers")
    if y.ndim == 1 and missing.any():
        raise BadInput(
            f"{where}: the target in row {int(missing.argmax())} is missing; remove the row"
        )
    if np.isinf(y).any():
        row = np.unravel_index(np.isinf(y).argmax(), y.shape)[0]
        raise BadInput(f"{where}: the target in row {row} is infinite (or too large for float32)")
    return y


def _names_of_outputs(where: str, y: NDArray[Any], names: tuple[str, ...]) -> tuple[str, ...]:
    outputs = y.shape[1] if y.ndim == 2 else 0
    if names and len(names) != outputs:
        raise BadInput(
            f"{where}: {len(names)} class_names for y of shape {y.shape};"
            f" expected {outputs or 'none'}"
        )
    return names


def _labels(
    where: str, y: NDArray[Any], names: tuple[str, ...]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Indices of the labels in the class names: those given, or all labels in ascending order."""
    if y.dtype.kind == "S":
        y = np.char.decode(y, "utf-8", "replace")
    found, index = np.unique(y, return_inverse=True)
    index = index.reshape(y.shape).astype(np.int64)
    if len(found) == 1:
        raise BadInput(f"{where}: every label is {found[0]}; expected at least 2 classes")
    if not names:
        if len(found) > MAX_CLASSES:
            raise BadInput(
                f"{where}: y has {len(found):,} different labels, allowed without class_names are "
                f"{MAX_CLASSES:,}; give numbers to predict as floats"
            )
        return index, tuple(str(label) for label in found.tolist())
    if y.dtype.kind == "U":
        places = {name: place for place, name in enumerate(names)}
        bad = ~np.isin(found, names)
        table = [places.get(label, -1) for label in found.tolist()]
    else:
        bad = (found < 0) | (found >= len(names))
        table = found.tolist()
    if bad.any():
        row = int((index == bad.argmax()).argmax())
        allowed = f"0 to {len(names) - 1}" if y.dtype.kind != "U" else ", ".join(names[:12])
        raise BadInput(
            f"{where}: label {y[row]} in row {row} is out of range; allowed are {allowed}"
        )
    return np.asarray(table, dtype=np.int64)[index], names


def as_images(x: NDArray[Any]) -> NDArray[Any]:
    """uint8 arrays of 3 or 4 axes as float32 in [0, 1] with a channel axis; others unchanged."""
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x
    scaled = x.astype(np.float32) / np.float32(255)
    return scaled[:, np.newaxis] if x.ndim == 3 else scaled


def _inputs(where: str, given: object, rows: int) -> Inputs:
    if isinstance(given, np.memmap) and given.ndim:
        given = mapped(given)
    x = given if isinstance(given, StoredInputs) else as_array(where, "x", given)
    if x.dtype.kind not in "fiub":
        raise BadInput(f"{where}: x is {x.dtype}; expected numbers")
    if x.ndim < 2:
        raise BadInput(
            f"{where}: x has shape {x.shape}; expected (n, features), (n, time, channels) "
            "or (n, channels, height, width)"
        )
    if len(x) != rows:
        raise BadInput(f"{where}: x has {len(x)} rows and y has {rows}; expected equal numbers")
    if not np.prod(x.shape):
        raise BadInput(f"{where}: x has shape {x.shape}; expected at least one feature")
    if isinstance(x, StoredInputs):
        return x if x.dtype in (np.float32, np.int64) else x.converted(_typed)
    x = _typed(x)
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        _check_missing_values(where, x)
    return x


def _typed(x: NDArray[Any]) -> NDArray[Any]:
    """The inputs in float32, or integers in int64."""
    x = as_images(x)
    if x.dtype.kind in "iu":
        return x.astype(np.int64, copy=False)
    with np.errstate(over="ignore"):
        return x.astype(np.float32, copy=False)


def _check_missing_values(where: str, x: NDArray[np.float32]) -> None:
    axis = feature_axis(x.ndim)
    kind = "column" if x.ndim == 2 else "channel"
    infinite = np.isinf(x)
    if infinite.any():
        index = np.unravel_index(infinite.argmax(), x.shape)
        raise BadInput(
            f"{where}: x is infinite (or too large for float32) in row {index[0]}, "
            f"{kind} {index[axis]}; expected finite numbers, or NaN for a missing value"
        )
    missing = np.isnan(x).all(axis=tuple(a for a in range(x.ndim) if a != axis))
    if missing.all():
        raise BadInput(f"{where}: every value of x is missing; expected numbers")
    if missing.any():
        raise BadInput(
            f"{where}: {kind} {int(missing.argmax())} of x is missing in every row; "
            f"remove the {kind} or give it a value"
        )


def _subjects(where: str, given: object, rows: int) -> NDArray[np.generic] | None:
    if given is None:
        return None
    subject = np.asarray(given)
    if subject.shape != (rows,):
        raise BadInput(f"{where}: subject has shape {subject.shape}; expected ({rows},) as y")
    if subject.dtype.kind not in "iuUS":
        raise BadInput(f"{where}: subject is {subject.dtype}; expected integers or text")
    return subject


def _test_mask(where: str, given: object, rows: int) -> NDArray[np.bool_] | None:
    if given is None:
        return None
    test = np.asarray(given)
    if test.shape != (rows,):
        raise BadInput(f"{where}: test has shape {test.shape}; expected ({rows},) as y")
    if test.dtype.kind != "b":
        raise BadInput(f"{where}: test is {test.dtype}; expected bool, true for a test row")
    return test


@dataclass(frozen=True)
class SourceOptions:
    """Options for reading a source; an empty value or 0 means the source's default."""

    variant: str = ""
    sensors: tuple[str, ...] = ()
    label: str = ""
    activities: tuple[int, ...] = ()
    length: int = 0  # samples per window
    step: int = 0  # samples between the starts of two windows
    target: str | tuple[str, ...] = "label"  # the columns to predict
    subject: str = ""  # the column that names the device
    columns: tuple[str, ...] = ()  # the columns of the inputs
    ignore: tuple[str, ...] = ()  # columns that are not inputs
    size: int = 0  # pixels of an image in both directions

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are not at their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)


def drop_rare_classes(dataset: Dataset, min_examples: int) -> Dataset:
    """The dataset without classes of fewer than `min_examples` examples; a note names them."""
    if not min_examples:
        return dataset
    need_classes(dataset.y, f"data.min_examples = {min_examples}", "set it to 0")
    counts = np.bincount(dataset.y, minlength=dataset.num_classes)
    kept = np.flatnonzero(counts >= min_examples)
    if len(kept) == dataset.num_classes:
        return dataset
    rows = np.isin(dataset.y, kept)
    dropped = np.flatnonzero(counts < min_examples)
    names = ", ".join(f"{dataset.class_names[c]} ({counts[c]})" for c in dropped)
    return replace(
        dataset,
        x=select(dataset.x, rows),
        y=np.searchsorted(kept, dataset.y[rows]),
        subject=None if dataset.subject is None else dataset.subject[rows],
        test=None if dataset.test is None else dataset.test[rows],
        class_names=tuple(dataset.class_names[c] for c in kept),
        notes=(
            *dataset.notes,
            f"classes of fewer than {min_examples} examples are dropped: {names}",
        ),
        where=f"data.min_examples = {min_examples}",
    )

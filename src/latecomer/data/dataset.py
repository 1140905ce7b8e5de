"""A labelled dataset in memory, validated on construction."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from latecomer.errors import BadInput

# Without class names the highest label sets the number of outputs; this rejects id columns.
MAX_UNNAMED_CLASSES = 100_000


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples with labels; NaN in `x` is a missing value.

    `x` is (n, features), (n, time, channels) or (n, channels, height, width). Arrays of other
    numeric types are converted; invalid arrays raise BadInput with `where` as the prefix.
    """

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    subject: NDArray[np.generic] | None = None  # the person or device that recorded each example
    test: NDArray[np.bool_] | None = None  # the official test rows
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # messages to the user: rows and classes left out when reading
    where: InitVar[str] = "data"

    def __post_init__(self, where: str) -> None:
        y = _labels(where, self.y, self.class_names)
        names = self.class_names or tuple(str(label) for label in range(int(y.max()) + 1))
        for field, value in {
            "x": _features(where, self.x, len(y)),
            "y": y,
            "subject": _subjects(where, self.subject, len(y)),
            "test": _test_mask(where, self.test, len(y)),
            "class_names": tuple(str(name) for name in names),
        }.items():
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def feature_axis(ndim: int) -> int:
    """The axis of the features: columns of a table, channels of a series or of an image."""
    return 1 if ndim == 4 else ndim - 1


def _labels(where: str, given: object, names: Sequence[str]) -> NDArray[np.int64]:
    y = np.asarray(given)
    if y.ndim != 1:
        raise BadInput(f"{where}: y has shape {y.shape}; expected (n,)")
    if len(y) == 0:
        raise BadInput(f"{where}: there are no examples; expected at least 2")
    if y.dtype.kind not in "iu":
        raise BadInput(f"{where}: y is {y.dtype}; labels must be integers from 0")
    limit = len(names) or MAX_UNNAMED_CLASSES
    bad = (y < 0) | (y >= limit)
    if bad.any():
        row = int(bad.argmax())
        hint = "" if names else " without class_names"
        raise BadInput(
            f"{where}: label {y[row]} in row {row} is out of range; "
            f"allowed{hint} are 0 to {limit - 1}"
        )
    if (y == y[0]).all():
        raise BadInput(f"{where}: every label is {y[0]}; expected at least 2 classes")
    return y.astype(np.int64)


def _features(where: str, given: object, rows: int) -> NDArray[np.float32]:
    x = np.asarray(given)
    if x.dtype.kind not in "fiub":
        raise BadInput(f"{where}: x is {x.dtype}; expected numbers")
    if x.ndim not in (2, 3, 4):
        raise BadInput(
            f"{where}: x has shape {x.shape}; expected (n, features), (n, time, channels) "
            "or (n, channels, height, width)"
        )
    if len(x) != rows:
        raise BadInput(f"{where}: x has {len(x)} rows and y has {rows}; expected equal numbers")
    if x.size == 0:
        raise BadInput(f"{where}: x has shape {x.shape}; expected at least one feature")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        _check_missing_values(where, x)
    return x


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

    @property
    def given(self) -> tuple[str, ...]:
        """The options that are not at their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)


def drop_rare_classes(dataset: Dataset, min_examples: int) -> Dataset:
    """The dataset without classes of fewer than `min_examples` examples; a note names them."""
    counts = np.bincount(dataset.y, minlength=dataset.num_classes)
    kept = np.flatnonzero(counts >= min_examples)
    if len(kept) == dataset.num_classes:
        return dataset
    rows = np.isin(dataset.y, kept)
    dropped = np.flatnonzero(counts < min_examples)
    names = ", ".join(f"{dataset.class_names[c]} ({counts[c]})" for c in dropped)
    return replace(
        dataset,
        x=dataset.x[rows],
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

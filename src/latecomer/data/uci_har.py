"""Reader of the published UCI HAR folder: 561 features, or windows of the inertial signals.

D. Anguita, A. Ghio, L. Oneto, X. Parra, J. L. Reyes-Ortiz. A Public Domain Dataset for Human
Activity Recognition Using Smartphones. ESANN 2013.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions
from latecomer.data.tables import check_names, find_folder, read_integers, read_numbers
from latecomer.errors import BadInput

VARIANTS = ("features", "inertial")
FEATURES, SAMPLES = 561, 128
SIGNALS = tuple(
    f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
PUBLISHED_ROWS = {"train": 7352, "test": 2947}


def read_uci_har(path: Path, options: SourceOptions) -> Dataset:
    """The rows of `train`, then of `test`, which are the official test rows."""
    variant = options.variant or "features"
    check_names("data.variant", [variant], VARIANTS)
    root = find_folder(path, "activity_labels.txt", "UCI HAR")
    names = _activities(root / "activity_labels.txt")
    labels = {s: _labels(root / s / f"y_{s}.txt", len(names)) for s in PUBLISHED_ROWS}
    read = _features if variant == "features" else _inertial
    parts = [read(root, split) for split in PUBLISHED_ROWS]
    subjects = [read_integers(root / split / f"subject_{split}.txt") for split in PUBLISHED_ROWS]
    for split, x, subject in zip(PUBLISHED_ROWS, parts, subjects, strict=True):
        _check_rows(root / split, len(labels[split]), {"X": len(x), "subject": len(subject)})
    return Dataset(
        x=np.concatenate(parts),
        y=np.concatenate(list(labels.values())),
        subject=np.concatenate(subjects),
        test=np.repeat([False, True], [len(part) for part in parts]),
        class_names=names,
        notes=tuple(_notes(labels)),
        where=str(root),
    )


def _activities(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    table = [line for line in lines if line]
    if [line[0] for line in table] != [str(i + 1) for i in range(len(table))] or not all(
        len(line) == 2 for line in table
    ):
        raise BadInput(f"{path}: expected lines such as '1 WALKING', numbered from 1")
    return tuple(name for _, name in table)


def _labels(path: Path, classes: int) -> NDArray[np.int64]:
    labels = read_integers(path)
    if (bad := (labels < 1) | (labels > classes)).any():
        row = int(bad.argmax())
        raise BadInput(f"{path}: row {row + 1} is {labels[row]}; allowed are 1 to {classes}")
    return labels - 1


def _features(root: Path, split: str) -> NDArray[np.float32]:
    return read_numbers(root / split / f"X_{split}.txt", FEATURES)


def _inertial(root: Path, split: str) -> NDArray[np.float32]:
    """(n, 128, 9): body acceleration, gyroscope, total acceleration, x, y and z of each."""
    folder = root / split / "Inertial Signals"
    channels = [read_numbers(folder / f"{signal}_{split}.txt", SAMPLES) for signal in SIGNALS]
    if len({len(channel) for channel in channels}) > 1:
        sizes = ", ".join(f"{s} {len(c)}" for s, c in zip(SIGNALS, channels, strict=True))
        raise BadInput(f"{folder}: the signals differ in length ({sizes}); is one truncated?")
    return np.stack(channels, axis=2)


def _check_rows(folder: Path, expected: int, found: dict[str, int]) -> None:
    for name, rows in found.items():
        if rows != expected:
            raise BadInput(f"{folder}: {name} has {rows} rows and y has {expected}; is one cut?")


def _notes(labels: dict[str, NDArray[np.int64]]) -> Iterable[str]:
    rows = {split: len(part) for split, part in labels.items()}
    if rows != PUBLISHED_ROWS:
        yield (
            f"UCI HAR: {rows['train']} training and {rows['test']} test rows; the published files"
            f" have {PUBLISHED_ROWS['train']} and {PUBLISHED_ROWS['test']}"
        )

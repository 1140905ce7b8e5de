"""PAMAP2 as it is published: one text file per subject and protocol, cut into windows.

A. Reiss, D. Stricker. Introducing a New Benchmarked Dataset for Activity Monitoring. ISWC 2012.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset
from latecomer.data.options import SourceOptions
from latecomer.data.sliding_windows import check_windowing, windows
from latecomer.data.tables import folder_holding, reading
from latecomer.errors import BadInput, unknown

COLUMNS = 54
LENGTH, STEP = 256, 128  # samples at 100 Hz: 2.56 s, half of it new
FOLDERS = {"protocol": ("Protocol",), "optional": ("Optional",), "both": ("Protocol", "Optional")}

ACTIVITY, HEART_RATE = 1, 2
# Of the 17 columns of a unit: temperature, acceleration (16 g), gyroscope, magnetometer. The 6 g
# acceleration saturates, and the orientation is invalid by the authors' own word.
OF_A_UNIT = (0, 1, 2, 3, 7, 8, 9, 10, 11, 12)
SENSORS: dict[str, tuple[int, ...]] = {
    "heart-rate": (HEART_RATE,),
    **{
        unit: tuple(first + column for column in OF_A_UNIT)
        for unit, first in (("hand", 3), ("chest", 20), ("ankle", 37))
    },
}
OTHER = 0  # between two activities
ACTIVITIES = {
    1: "lying",
    2: "sitting",
    3: "standing",
    4: "walking",
    5: "running",
    6: "cycling",
    7: "Nordic walking",
    9: "watching TV",
    10: "computer work",
    11: "car driving",
    12: "ascending stairs",
    13: "descending stairs",
    16: "vacuum cleaning",
    17: "ironing",
    18: "folding laundry",
    19: "house cleaning",
    20: "playing soccer",
    24: "rope jumping",
}


@dataclass(frozen=True, eq=False)
class _Recording:
    """The windows of one file, and how many of its rows are in none."""

    subject: str
    x: NDArray[np.float32]
    activity: NDArray[np.int64]
    rows: int
    dropped: Counter[str]


def read_pamap2(path: Path, options: SourceOptions) -> Dataset:
    """Windows of one activity each, of the chosen sensors; gaps stay missing values.

    The heart rate comes at 9 Hz and is held until the next beat. The classes are the activities
    that occur, in the order of the published table.
    """
    variant = options.variant or "protocol"
    if variant not in FOLDERS:
        raise unknown("data.variant", variant, FOLDERS)
    for sensor in options.sensors:
        if sensor not in SENSORS:
            raise unknown("data.sensors", sensor, SENSORS)
    for activity in options.activities:
        if activity not in ACTIVITIES:
            allowed = ", ".join(map(str, ACTIVITIES))
            raise BadInput(f"data.activities holds {activity}; allowed are {allowed}")
    length = options.length or LENGTH
    step = options.step or max(1, length * STEP // LENGTH)
    check_windowing(str(path), length, step)
    columns = [c for sensor in options.sensors or SENSORS for c in SENSORS[sensor]]
    wanted = options.activities or tuple(ACTIVITIES)
    files = [file for name in FOLDERS[variant] for file in _files(path, name)]
    found = [_record(file, columns, wanted, length, step) for file in files]
    if not sum(len(each.x) for each in found):
        raise BadInput(f"{path}: no window of {length} samples holds one of the activities")
    seen = np.concatenate([each.activity for each in found])
    present = np.unique(seen)
    return Dataset(
        x=np.concatenate([each.x for each in found]),
        y=np.searchsorted(present, seen),
        subject=np.repeat([each.subject for each in found], [len(each.x) for each in found]),
        class_names=tuple(ACTIVITIES[number] for number in present.tolist()),
        notes=tuple(_notes(found)),
        where=str(path),
    )


def _files(path: Path, name: str) -> list[Path]:
    folder = folder_holding(path, name, "PAMAP2 (it holds Protocol and Optional)") / name
    files = sorted(folder.glob("subject*.dat"))
    if not files:
        raise BadInput(f"{folder}: no subject10N.dat is here")
    return files


def _record(
    path: Path, columns: Sequence[int], wanted: Sequence[int], length: int, step: int
) -> _Recording:
    _check_last_line(path)
    table = reading(path, lambda: pd.read_csv(path, sep=" ", header=None, na_values="NaN"))
    if table.shape[1] != COLUMNS:
        raise BadInput(f"{path}: {table.shape[1]} columns; expected {COLUMNS}")
    activity = table[ACTIVITY].to_numpy()
    known = np.isin(activity, (OTHER, *ACTIVITIES))
    if not known.all():
        row = int((~known).argmax())
        raise BadInput(
            f"{path}: row {row + 1} has the unknown activity {activity[row]};"
            f" allowed are 0, {', '.join(map(str, ACTIVITIES))}"
        )
    table[HEART_RATE] = table[HEART_RATE].ffill().bfill()
    values = table[list(columns)].to_numpy(dtype=np.float32)
    dropped: Counter[str] = Counter()
    xs, labels = [], []
    borders = np.flatnonzero(np.diff(activity)) + 1
    for stretch in np.split(np.arange(len(activity)), borders):
        label = int(activity[stretch[0]])
        if label not in wanted:
            reason = "no activity" if label == OTHER else "an activity not asked for"
            dropped[reason] += len(stretch)
            continue
        cut = windows(values[stretch], length, step)
        covered = (len(cut) - 1) * step + length if len(cut) else 0
        dropped["the rest of a stretch, shorter than a window"] += len(stretch) - min(
            covered, len(stretch)
        )
        xs.append(cut)
        labels.append(np.full(len(cut), label))
    empty = np.empty((0, length, len(columns)), dtype=np.float32)
    return _Recording(
        subject=path.stem.removeprefix("subject"),
        x=np.concatenate([empty, *xs]),
        activity=np.concatenate([np.empty(0, np.int64), *labels]),
        rows=len(activity),
        dropped=dropped,
    )


def _check_last_line(path: Path) -> None:
    """A file cut short ends in mid-line, which a reader of tables takes for missing values."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4096))
        last = (file.read().split(b"\n") or [b""])[-2:]
    fields = len((last[-1].strip() or last[0]).split())
    if fields != COLUMNS:
        raise BadInput(
            f"{path}: the last line has {fields} values, expected {COLUMNS}; is it truncated?"
        )


def _notes(found: Sequence[_Recording]) -> Iterable[str]:
    rows = sum(each.rows for each in found)
    total: Counter[str] = Counter()
    for each in found:
        total.update(each.dropped)
    for reason, count in total.items():
        if count:
            yield f"{count} of {rows} rows are in no window: {reason}"
    subjects = {each.subject for each in found}
    kept = {each.subject for each in found if len(each.x)}
    if gone := sorted(subjects - kept):
        yield f"{len(gone)} of {len(subjects)} subjects have no window: {', '.join(gone)}"

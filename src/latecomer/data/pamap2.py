"""Reader of the published PAMAP2 files, one per subject and protocol, cut into sliding windows.

A. Reiss, D. Stricker. Introducing a New Benchmarked Dataset for Activity Monitoring. ISWC 2012.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions
from latecomer.data.sliding_windows import covered_samples, sliding_windows, window_size
from latecomer.data.tables import check_names, find_folder, read_table
from latecomer.errors import BadInput

COLUMNS = 54
LENGTH, STEP = 256, 128  # samples at 100 Hz: windows of 2.56 s that overlap by half
FOLDERS = {"protocol": ("Protocol",), "optional": ("Optional",), "both": ("Protocol", "Optional")}

ACTIVITY, HEART_RATE = 1, 2
# Of the 17 columns of a unit: temperature, acceleration (16 g), gyroscope, magnetometer. The 6 g
# acceleration saturates, and the authors declare the orientation invalid.
UNIT_COLUMNS = (0, 1, 2, 3, 7, 8, 9, 10, 11, 12)
SENSORS: dict[str, tuple[int, ...]] = {
    "heart-rate": (HEART_RATE,),
    **{
        unit: tuple(first + column for column in UNIT_COLUMNS)
        for unit, first in (("hand", 3), ("chest", 20), ("ankle", 37))
    },
}
TRANSIENT = 0  # label of rows between two activities
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
    """The windows of one file, and the number of its rows that are in no window, by reason."""

    subject: str
    x: NDArray[np.float32]
    activity: NDArray[np.int64]
    rows: int
    dropped: Counter[str]


def read_pamap2(path: Path, options: SourceOptions) -> Dataset:
    """Windows of one activity each, of the chosen sensors; gaps stay missing values.

    The heart rate is sampled at 9 Hz; each value is held until the next. The classes are the
    activities that occur, in the order of the published table.
    """
    variant = options.variant or "protocol"
    check_names("data.variant", [variant], FOLDERS)
    check_names("data.sensors", options.sensors, SENSORS)
    for activity in options.activities:
        if activity not in ACTIVITIES:
            allowed = ", ".join(map(str, ACTIVITIES))
            raise BadInput(f"data.activities holds {activity}; allowed are {allowed}")
    length, step = window_size(str(path), options, LENGTH, STEP)
    columns = [c for sensor in options.sensors or SENSORS for c in SENSORS[sensor]]
    wanted = options.activities or tuple(ACTIVITIES)
    files = [file for name in FOLDERS[variant] for file in _files(path, name)]
    recordings = [_read_recording(file, columns, wanted, length, step) for file in files]
    sizes = [len(recording.x) for recording in recordings]
    if not sum(sizes):
        raise BadInput(f"{path}: no window of {length} samples holds one of the activities")
    labels = np.concatenate([recording.activity for recording in recordings])
    present = np.unique(labels)
    return Dataset(
        x=np.concatenate([recording.x for recording in recordings]),
        y=np.searchsorted(present, labels),
        subject=np.repeat([recording.subject for recording in recordings], sizes),
        class_names=tuple(ACTIVITIES[number] for number in present.tolist()),
        notes=tuple(_notes(recordings)),
        where=str(path),
    )


def _files(path: Path, name: str) -> list[Path]:
    folder = find_folder(path, name, "PAMAP2 (it holds Protocol and Optional)") / name
    files = sorted(folder.glob("subject*.dat"))
    if not files:
        raise BadInput(f"{folder}: there is no subject10N.dat")
    return files


def _read_recording(
    path: Path, columns: Sequence[int], wanted: Sequence[int], length: int, step: int
) -> _Recording:
    _check_last_line(path)
    table = read_table(path, lambda: pd.read_csv(path, sep=" ", header=None, na_values="NaN"))
    if table.shape[1] != COLUMNS:
        raise BadInput(f"{path}: {table.shape[1]} columns; expected {COLUMNS}")
    activity = table[ACTIVITY].to_numpy()
    known = np.isin(activity, (TRANSIENT, *ACTIVITIES))
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
            reason = "no activity" if label == TRANSIENT else "an activity not in data.activities"
            dropped[reason] += len(stretch)
            continue
        windows = sliding_windows(values[stretch], length, step)
        covered = covered_samples(len(windows), length, step)
        dropped["the rest of a stretch, shorter than a window"] += len(stretch) - covered
        xs.append(windows)
        labels.append(np.full(len(windows), label))
    empty = np.empty((0, length, len(columns)), dtype=np.float32)
    return _Recording(
        subject=path.stem.removeprefix("subject"),
        x=np.concatenate([empty, *xs]),
        activity=np.concatenate([np.empty(0, np.int64), *labels]),
        rows=len(activity),
        dropped=dropped,
    )


def _check_last_line(path: Path) -> None:
    """Raise BadInput if the last line is incomplete; pandas would read it as missing values."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4096))
        last = (file.read().split(b"\n") or [b""])[-2:]
    fields = len((last[-1].strip() or last[0]).split())
    if fields != COLUMNS:
        raise BadInput(
            f"{path}: the last line has {fields} values, expected {COLUMNS}; is it truncated?"
        )


def _notes(recordings: Sequence[_Recording]) -> Iterable[str]:
    rows = sum(recording.rows for recording in recordings)
    total: Counter[str] = Counter()
    for recording in recordings:
        total.update(recording.dropped)
    for reason, count in total.items():
        if count:
            yield f"{count} of {rows} rows are in no window: {reason}"
    subjects = {recording.subject for recording in recordings}
    kept = {recording.subject for recording in recordings if len(recording.x)}
    if dropped := sorted(subjects - kept):
        yield f"{len(dropped)} of {len(subjects)} subjects have no window: {', '.join(dropped)}"

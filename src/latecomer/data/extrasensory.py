"""Reader of the published ExtraSensory files, one csv.gz of features and labels per user.

Y. Vaizman, K. Ellis, G. Lanckriet. Recognizing Detailed Human Context In-the-Wild from Smartphones
and Smartwatches. IEEE Pervasive Computing 16(4), 2017.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset, SourceOptions, Targets
from latecomer.data.tables import check_names, read_table
from latecomer.errors import BadInput, unknown

FILE_SUFFIX = ".features_labels.csv.gz"
COLUMNS = 278
ALL_LABELS = "all"

# Sensor -> first part of the names of its columns.
SENSORS = {
    "accelerometer": "raw_acc",
    "gyroscope": "proc_gyro",
    "magnetometer": "raw_magnet",
    "watch-accelerometer": "watch_acceleration",
    "watch-compass": "watch_heading",
    "location": "location",
    "location-quick": "location_quick_features",
    "audio": "audio_naive",
    "audio-properties": "audio_properties",
    "phone-state": "discrete",
    "environment": "lf_measurements",
    "time-of-day": "discrete:time_of_day",
}
# The default. Gajanin et al. 2024, section 4.2: sensors with few missing values.
PAPER_SENSORS = (
    "accelerometer",
    "gyroscope",
    "watch-accelerometer",
    "watch-compass",
    "audio",
    "audio-properties",
    "phone-state",
)
# Mutually exclusive main activities.
MAIN_ACTIVITIES = (
    "LYING_DOWN",
    "SITTING",
    "OR_standing",
    "FIX_walking",
    "FIX_running",
    "BICYCLING",
)


@dataclass(frozen=True, eq=False)
class _User:
    """The labelled rows of one file, and the numbers of dropped rows."""

    name: str
    x: NDArray[np.float32]
    y: Targets
    unlabelled: int
    ambiguous: int


def read_extrasensory(path: Path, options: SourceOptions) -> Dataset:
    """One example per minute, in order of time; the subject is the user's id.

    Without `options.label` the classes are the six main activities, and rows with none or several
    of them are dropped. With it the classes are that label absent or present, and rows where it
    is missing are dropped. With the label "all" the targets are all labels at once, 1 or 0, or NaN
    where a label is missing; rows without any are dropped.
    """
    files = _files(path)
    header = _header(files[0])
    features = _features(files[0], header, options.sensors or PAPER_SENSORS)
    labels = _labels(files[0], header, options.label)
    several = options.label == ALL_LABELS
    users = [_read(file, header, features, labels, several) for file in files]
    kept = [user for user in users if len(user.y)]
    if not kept:
        wanted = "any of all" if several else ", ".join(labels)
        raise BadInput(f"{path}: no row of any user has a usable label ({wanted})")
    x = np.concatenate([user.x for user in kept])
    observed = ~np.isnan(x).all(axis=0)
    unobserved = [name for name, kept in zip(features, observed, strict=True) if not kept]
    short = tuple(name.removeprefix("label:") for name in labels)
    return Dataset(
        x=x[:, observed],
        y=np.concatenate([user.y for user in kept]),
        subject=np.repeat([user.name for user in kept], [len(user.y) for user in kept]),
        class_names=short if len(short) > 1 else (f"not {short[0]}", short[0]),
        notes=tuple(_notes(users, unobserved)),
        where=str(path),
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise BadInput(f"{path}: is a file; expected the folder with <user>{FILE_SUFFIX}")
    files = sorted(path.glob(f"*{FILE_SUFFIX}"))
    if not files:
        raise BadInput(f"{path}: no file ends in {FILE_SUFFIX}; expected one per user")
    return files


def _header(path: Path) -> list[str]:
    header = list(read_table(path, lambda: pd.read_csv(path, nrows=0)).columns)
    if len(header) != COLUMNS or header[0] != "timestamp" or header[-1] != "label_source":
        raise BadInput(
            f"{path}: {len(header)} columns from {header[0]!r} to {header[-1]!r};"
            f" expected {COLUMNS} from 'timestamp' to 'label_source'"
        )
    return header


def _features(path: Path, header: Sequence[str], sensors: Iterable[str]) -> list[str]:
    chosen = list(sensors)
    check_names("data.sensors", chosen, SENSORS)
    found = [name for name in header if not name.startswith("label") and _sensor(name) in chosen]
    for sensor in chosen:
        if not any(_sensor(name) == sensor for name in found):
            raise BadInput(f"{path}: no column {SENSORS[sensor]}:* for the sensor {sensor!r}")
    return found


def _sensor(column: str) -> str | None:
    """The sensor of a column; time-of-day columns have the prefix of the phone's state."""
    if column.startswith("discrete:time_of_day"):
        return "time-of-day"
    block = column.split(":")[0]
    return next((sensor for sensor, name in SENSORS.items() if name == block), None)


def _labels(path: Path, header: Sequence[str], label: str) -> list[str]:
    known = [name.removeprefix("label:") for name in header if name.startswith("label:")]
    if label == ALL_LABELS:
        return [f"label:{name}" for name in known]
    wanted = [label] if label else list(MAIN_ACTIVITIES)
    for name in wanted:
        if name not in known:
            if label:
                raise unknown("data.label", name, [ALL_LABELS, *known])
            raise BadInput(f"{path}: the column 'label:{name}' is missing")
    return [f"label:{name}" for name in wanted]


def _read(
    path: Path, header: Sequence[str], features: Sequence[str], labels: Sequence[str], several: bool
) -> _User:
    table = read_table(path, lambda: pd.read_csv(path, low_memory=False))
    if list(table.columns) != list(header):
        extra = next(
            (name for name in table.columns if name not in header), f"{len(table.columns)} columns"
        )
        raise BadInput(f"{path}: unknown column {extra!r}; expected the columns of other users")
    table = table.sort_values("timestamp", kind="stable")
    values = _numbers(path, table, labels)
    if not np.isin(values[~np.isnan(values)], (0, 1)).all():
        raise BadInput(f"{path}: a label is neither 0, 1 nor missing")
    y: Targets
    if several:
        known = ~np.isnan(values).all(axis=1)
        ambiguous, y = np.zeros_like(known), values
    elif len(labels) == 1:
        known = ~np.isnan(values[:, 0])
        ambiguous = np.zeros_like(known)
        y = np.nan_to_num(values[:, 0]).astype(np.int64)
    else:
        count = np.nansum(values, axis=1)
        known, ambiguous = count == 1, count > 1
        y = np.nan_to_num(values).argmax(axis=1)
    return _User(
        name=path.name.removesuffix(FILE_SUFFIX),
        x=_numbers(path, table, features)[known],
        y=y[known],
        unlabelled=int((~known & ~ambiguous).sum()),
        ambiguous=int(ambiguous.sum()),
    )


def _numbers(path: Path, table: pd.DataFrame, columns: Sequence[str]) -> NDArray[np.float32]:
    """(rows, columns); `nan`, an empty field and an infinite value are missing values."""
    for name in columns:
        if not pd.api.types.is_numeric_dtype(table[name]):
            raise BadInput(f"{path}: column {name!r} holds text; expected numbers or nan")
    with np.errstate(over="ignore"):
        values = table[list(columns)].to_numpy(dtype=np.float32, copy=True)
    values[np.isinf(values)] = np.nan
    return values


def _notes(users: Sequence[_User], unobserved: Sequence[str]) -> Iterable[str]:
    rows = sum(len(user.y) + user.unlabelled + user.ambiguous for user in users)
    if unlabelled := sum(user.unlabelled for user in users):
        yield f"{unlabelled} of {rows} rows have no label and are dropped"
    if ambiguous := sum(user.ambiguous for user in users):
        yield f"{ambiguous} of {rows} rows have several labels and are dropped"
    if empty := [user.name for user in users if not len(user.y)]:
        yield f"{len(empty)} of {len(users)} users have no labelled row: {', '.join(empty)}"
    if unobserved:
        count, first = len(unobserved), unobserved[0]
        yield f"{count} features have no value in any row and are dropped: {first}, ..."

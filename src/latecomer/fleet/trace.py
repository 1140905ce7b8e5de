"""Device profiles read from a CSV file, or from a folder of FedScale's or FLASH's traces.

The header of the CSV file names the columns, in any order. `device` is required: consecutive ids
from 0. Optional are seconds_per_example, seconds_per_task, down, up, latency, jitter, dropout,
crash, restart_seconds, detect_seconds, period, group, window_start and window_end, as in
DeviceProfile; a missing column or an empty cell means the default. Each further row of a device
adds a window; its other cells must be equal or empty. Error messages number rows as lines of the
file: the header is row 1.
"""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput, unknown
from latecomer.fleet.profile import ALLOWED, DeviceProfile, check_field, check_window
from latecomer.fleet.published_traces import read_published

COLUMNS = ("device", *ALLOWED, "group", "window_start", "window_end")


@dataclass(slots=True)
class _Record:
    """The values of one device in the rows read so far."""

    cells: dict[str, float | str] = field(default_factory=dict)
    windows: list[tuple[str, float, float]] = field(default_factory=list)  # row, start, end


def read_trace(path: str) -> tuple[tuple[DeviceProfile, ...], tuple[str, ...]]:
    """(profiles in order of device id, messages to the user) of a CSV file or a trace folder."""
    if not path:
        raise BadInput("fleet.path = '': profile 'trace' needs the path of a CSV file or folder")
    if Path(path).is_dir():
        return read_published(Path(path))
    return _read_csv(path), ()


def _read_csv(path: str) -> tuple[DeviceProfile, ...]:
    records: dict[int, _Record] = {}
    for where, row in _rows(path):
        device = _device_id(where, row.get("device", ""))
        _add_row(records.setdefault(device, _Record()), where, row)
    if not records:
        raise BadInput(f"{path}: no devices; a header and at least one row are needed")
    for device in range(len(records)):
        if device not in records:
            raise BadInput(
                f"{path}, column device: {device} is missing; the {len(records)} ids must be "
                f"0 to {len(records) - 1}"
            )
    return tuple(_profile(records[device]) for device in range(len(records)))


def _rows(path: str) -> list[tuple[str, dict[str, str]]]:
    """(file and row for messages, {column: stripped cell}) of each row that is not blank."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [
                (f"{path}, row {reader.line_num}", [cell.strip() for cell in row]) for row in reader
            ]
    except OSError as error:
        raise BadInput(f"fleet.path = {path!r}: cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8 ({error})") from None
    lines = [(where, row) for where, row in lines if any(row)]
    if not lines:
        raise BadInput(f"{path}: empty; a header and at least one row are needed")
    header = lines[0][1]
    for position, name in enumerate(header):
        if name not in COLUMNS:
            raise unknown(f"{path}: column", name, COLUMNS)
        if name in header[:position]:
            raise BadInput(f"{path}: column {name!r} occurs twice; allowed is once")
    if "device" not in header:
        raise BadInput(f"{path}: column 'device' is missing; it is required")
    for where, row in lines[1:]:
        if len(row) > len(header):
            raise BadInput(f"{where}: {len(row)} cells; allowed are at most {len(header)}")
    return [(where, dict(zip(header, row, strict=False))) for where, row in lines[1:]]


def _device_id(where: str, cell: str) -> int:
    try:
        device = int(cell)
    except ValueError:
        device = -1
    if device < 0:
        raise BadInput(f"{where}, column device = {cell!r}: allowed is a whole number from 0")
    return device


def _number(where: str, column: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise BadInput(f"{where}, column {column} = {cell!r}: allowed is a number") from None


def _add_row(record: _Record, where: str, row: dict[str, str]) -> None:
    window = row.get("window_start", ""), row.get("window_end", "")
    if any(window):
        start = _number(where, "window_start", window[0])
        end = _number(where, "window_end", window[1])
        record.windows.append((where, start, end))
    for column in (*ALLOWED, "group"):
        cell = row.get(column, "")
        if not cell:
            continue
        value: float | str = cell
        if column != "group":
            value = _number(where, column, cell)
            try:
                check_field(column, value)
            except BadInput as error:
                raise BadInput(f"{where}, column {error}") from None
        if record.cells.setdefault(column, value) != value:
            raise BadInput(
                f"{where}, column {column} = {cell!r}: an earlier row of this device has "
                f"{record.cells[column]!r}; allowed is the same or an empty cell"
            )


def _profile(record: _Record) -> DeviceProfile:
    cells: dict[str, Any] = record.cells
    profile = DeviceProfile(**cells)
    for where, start, end in record.windows:
        try:
            check_window(start, end, profile.period)
        except BadInput as error:
            raise BadInput(f"{where}, column {error}") from None
    return replace(profile, windows=tuple((start, end) for _, start, end in record.windows))

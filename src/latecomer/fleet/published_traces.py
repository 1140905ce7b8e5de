"""Device profiles from the trace files that FedScale and FLASH publish.

FedScale (Lai et al., ICML 2022): a folder with `client_device_capacity.json` and, if availability
is wanted, `client_behave_trace.json`. FedScale publishes them pickled, which is not read because a
pickle can run code; docs/fleets.md shows the conversion.
    capacity: {client: {"computation": ms per example of inference, "communication": kbit/s}}
    availability: {client: {"active": [s], "inactive": [s], "finish_time": s, "model": text}}

FLASH (Yang et al., WWW 2021): a folder with `user_behavior_tiny.json` or `user_behavior.json` and,
if links are wanted, `speed_distri.json`.
    behaviour: {user: {"guid": text, "model": text, "messages": "time<TAB>state" lines}}
    links: {user: {"down_u": KiB/s, "up_u": KiB/s, "down_sigma": ..., "up_sigma": ...}}
A FLASH trace has no seconds per example: set `fleet.seconds_per_example`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput
from latecomer.fleet.profile import DeviceProfile, Windows

CAPACITY = "client_device_capacity.json"
BEHAVIOUR = "client_behave_trace.json"
FLASH_BEHAVIOUR = ("user_behavior_tiny.json", "user_behavior.json")
FLASH_LINKS = "speed_distri.json"
LAYOUTS = f"{CAPACITY} (FedScale) or {' or '.join(FLASH_BEHAVIOUR)} (FLASH)"

# FedScale counts a training step as three times the inference latency that it lists.
TRAINING_PER_INFERENCE = 3.0
FLASH_TIME = "%Y-%m-%d %H:%M:%S"
# The connections that FLASH's user log names; any other than Wi-Fi ends a window.
FLASH_MOBILE = ("unknown", "2g", "3g", "4g", "5g")


def read_published(folder: Path) -> tuple[tuple[DeviceProfile, ...], tuple[str, ...]]:
    """(profiles, messages to the user) of the trace files in a folder, FedScale's or FLASH's."""
    capacity, behaviour = folder / CAPACITY, folder / BEHAVIOUR
    if capacity.is_file():
        active = _mapping(behaviour) if behaviour.is_file() else {}
        return _fedscale(_mapping(capacity), active, folder)
    for name in FLASH_BEHAVIOUR:
        if (folder / name).is_file():
            links = folder / FLASH_LINKS
            return _flash(
                _mapping(folder / name), _mapping(links) if links.is_file() else {}, folder
            )
    raise BadInput(f"fleet.path = '{folder}': a folder needs a file {LAYOUTS}")


def _fedscale(
    capacity: Mapping[Any, Any], behaviour: Mapping[Any, Any], folder: Path
) -> tuple[tuple[DeviceProfile, ...], tuple[str, ...]]:
    """One device per capacity entry; availability traces are repeated where they are fewer."""
    traces = [
        _fedscale_windows(f"{folder}/{BEHAVIOUR}, client {client}", _entry(behaviour, client))
        for client in _sorted(behaviour)
    ]
    usable = [trace for trace in traces if trace is not None]
    if traces and not usable:
        raise BadInput(f"{folder}/{BEHAVIOUR}: no client is ever active")
    profiles = []
    for position, client in enumerate(_sorted(capacity)):
        where = f"{folder}/{CAPACITY}, client {client}"
        entry = _entry(capacity, client)
        rate = _number(where, entry, "communication") * 1000 / 8
        windows, period, model = usable[position % len(usable)] if usable else ((), 86400.0, "")
        profiles.append(
            _profile(
                where,
                seconds_per_example=TRAINING_PER_INFERENCE
                * _number(where, entry, "computation")
                / 1000,
                down=rate,
                up=rate,
                windows=windows,
                period=period,
                group=model,
            )
        )
    if not profiles:
        raise BadInput(f"{folder}/{CAPACITY}: no clients")
    return tuple(profiles), _left_out(folder, len(traces) - len(usable), "is never active")


def _fedscale_windows(where: str, entry: Mapping[str, Any]) -> tuple[Windows, float, str] | None:
    """(active windows, period, phone model) of a client; None without a window of any length."""
    period = _number(where, entry, "finish_time")
    starts, ends = (_numbers(where, entry, name) for name in ("active", "inactive"))
    if len(starts) not in (len(ends), len(ends) + 1):
        raise BadInput(
            f"{where}: {len(starts)} values in 'active', {len(ends)} in 'inactive'; allowed are "
            "as many, or one more in 'active'"
        )
    closed = [*ends, period][: len(starts)]
    windows = tuple((s, min(e, period)) for s, e in zip(starts, closed, strict=True) if s < e)
    windows = tuple((start, end) for start, end in windows if start < end)
    return (windows, period, str(entry.get("model", ""))) if windows else None


def _flash(
    behaviour: Mapping[Any, Any], links: Mapping[Any, Any], folder: Path
) -> tuple[tuple[DeviceProfile, ...], tuple[str, ...]]:
    """One device per user who is ever locked, on Wi-Fi and charging; links are repeated."""
    rates = []
    for user in links:
        where, entry = f"{folder}/{FLASH_LINKS}, user {user}", _entry(links, user)
        rates.append(
            {name: 1024 * _number(where, entry, f"{name}_u", 1e-9) for name in ("down", "up")}
        )
    profiles: list[DeviceProfile] = []
    for user in behaviour:
        where, entry = f"{folder}, user {user}", _entry(behaviour, user)
        found = _flash_windows(where, str(entry.get("messages", "")))
        if found is None:
            continue
        windows, period = found
        link = rates[len(profiles) % len(rates)] if rates else {}
        model = str(entry.get("model", ""))
        profiles.append(_profile(where, windows=windows, period=period, group=model, **link))
    if not profiles:
        raise BadInput(f"{folder}: no user is ever locked, on Wi-Fi and charging")
    reason = "is never locked, on Wi-Fi and charging"
    return tuple(profiles), _left_out(folder, len(behaviour) - len(profiles), reason)


def _flash_windows(where: str, messages: str) -> tuple[Windows, float] | None:
    """(windows in which the phone is locked, on Wi-Fi and charging, length of the log in seconds).

    Seconds count from the first line of the log, which repeats after its last. None for a log
    without such a window.
    """
    state = {"locked": False, "wifi": False, "charging": False}
    first, last, opened = None, 0.0, None
    windows: list[tuple[float, float]] = []
    for line in filter(None, (line.strip() for line in messages.split("\n"))):
        stamp, separator, name = line.partition("\t")
        try:
            seconds = datetime.strptime(stamp.strip(), FLASH_TIME).timestamp()
        except ValueError:
            separator = ""
        if not separator:
            raise BadInput(f"{where}: line {line[:60]!r}; allowed is YYYY-MM-DD HH:MM:SS<TAB>state")
        first = seconds if first is None else first
        if seconds - first < last:
            raise BadInput(f"{where}: line {line[:60]!r} is earlier than the line before")
        last = seconds - first
        _flash_state(state, name.strip().lower())
        ready = all(state.values())
        if ready and opened is None:
            opened = last
        elif not ready and opened is not None:
            windows.append((opened, last))
            opened = None
    if opened is not None:
        windows.append((opened, last))
    used = tuple((start, end) for start, end in windows if start < end)
    return (used, last) if used else None


def _flash_state(state: dict[str, bool], name: str) -> None:
    """Update the phone's state by one line of the log; other lines (battery level) change none."""
    if name in ("screen_lock", "screen_unlock"):
        state["locked"] = name == "screen_lock"
    elif name in ("battery_charged_on", "battery_charged_off"):
        state["charging"] = name == "battery_charged_on"
    elif name == "wifi" or name in FLASH_MOBILE:
        state["wifi"] = name == "wifi"


def _left_out(folder: Path, count: int, reason: str) -> tuple[str, ...]:
    return (f"{folder}: {count} traces left out, whose phone {reason}",) if count else ()


def _profile(where: str, **fields: Any) -> DeviceProfile:
    try:
        return DeviceProfile(**fields)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _entry(table: Mapping[Any, Any], key: Any) -> Mapping[str, Any]:
    if not isinstance(table[key], Mapping):
        raise BadInput(f"trace entry {key}: {str(table[key])[:60]!r}; allowed is a table of fields")
    entry: Mapping[str, Any] = table[key]
    return entry


def _number(where: str, entry: Mapping[str, Any], name: str, least: float = 0.0) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{where}: {name} = {value!r}; allowed is a number")
    if not (isfinite(value) and value >= least):
        raise BadInput(f"{where}: {name} = {value!r}; allowed is a finite number from {least:g}")
    return float(value)


def _numbers(where: str, entry: Mapping[str, Any], name: str) -> list[float]:
    values = entry.get(name)
    if not isinstance(values, list | tuple):
        raise BadInput(f"{where}: {name} = {values!r}; allowed is a list of seconds")
    return [_number(where, {name: value}, name) for value in values]


def _sorted(table: Mapping[Any, Any]) -> list[Any]:
    """The keys in numeric order where they are numbers; JSON has them as text."""
    return sorted(
        table, key=lambda key: (0, int(key), "") if str(key).isdigit() else (1, 0, str(key))
    )


def _mapping(path: Path) -> Mapping[Any, Any]:
    """The table in a JSON file."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"fleet.path: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadInput(f"fleet.path: {path} is not JSON ({error})") from None
    if not isinstance(table, Mapping) or not table:
        raise BadInput(f"fleet.path: {path}: allowed is a table with one entry per client")
    return table

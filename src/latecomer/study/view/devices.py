"""Panels by device: local test accuracy, sub-model widths, and a table of all devices."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from latecomer.fleet.availability import next_open
from latecomer.study.view.history import History
from latecomer.study.view.panels import ORANGE, Panel, Rows, Series, View
from latecomer.study.view.timeline import Fleet, devices_in


def device_accuracy(devices: pd.DataFrame | None) -> Panel | None:
    """Local test accuracy of every device in ascending order; late devices are marked."""
    if devices is None or not devices["accuracy"].notna().any():
        return None
    known = devices[devices["accuracy"].notna()].sort_values(["accuracy", "device"])
    place = np.arange(1, len(known) + 1)
    late = known["late"].to_numpy() == 1
    series = [
        Series(name, place[mask].tolist(), known["accuracy"][mask].tolist(), "dots", colour=k)
        for name, mask, k in (("other devices", ~late, 0), ("late devices", late, ORANGE))
        if mask.any()
    ]
    view = View("by device", "devices, worst first", "accuracy", series, unit_share=True)
    return Panel(
        "devices",
        "Local test accuracy by device",
        "Accuracy of the model that each device uses, on that device's held-back data.",
        [view],
    )


def accuracy_of_all(tables: Mapping[str, Sequence[pd.DataFrame]]) -> Panel | None:
    """Quantiles of local test accuracy over the devices of all seeds, one line per strategy."""
    lines = []
    for label, some in tables.items():
        found = [t["accuracy"].dropna().to_numpy() for t in some]
        values = np.sort(np.concatenate(found)) if found else np.array([])
        if len(values):
            shares = np.linspace(0, 1, 101)
            lines.append(Series(label, shares.tolist(), np.quantile(values, shares).tolist()))
    if not lines:
        return None
    view = View("by device", "share of devices, worst first", "accuracy", lines, unit_share=True)
    return Panel(
        "devices",
        "Local test accuracy by device",
        "Accuracy of the model that each device uses, on that device's held-back data; devices of"
        " all seeds together. Left end: worst device; middle: median.",
        [view],
    )


def device_table(
    history: History, fleet: Fleet, devices: pd.DataFrame | None, budget: float, ended: bool
) -> Rows | None:
    """One row per device that has received a task or has times offline."""
    ids = devices_in(history, fleet)
    if not history.devices:
        return None
    busy = {device for device, _ in history.open.values()}
    columns: dict[str, list[object]] = {"device": list(ids)}
    if history.names:
        columns["name"] = [history.names.get(d, "") for d in ids]
    if fleet.late:
        columns["late"] = ["late" if d in fleet.late else "" for d in ids]
    columns["state"] = [_state(d, history, fleet, busy, ended) for d in ids]
    columns["updates"] = [history.updates.get(d, 0) for d in ids]
    columns["last staleness"] = [history.last_staleness.get(d) for d in ids]
    if history.spent:
        columns["epsilon"] = [history.spent.get(d, 0.0) for d in ids]
        if budget > 0:
            columns["budget left"] = [max(0.0, budget - history.spent.get(d, 0.0)) for d in ids]
    if carried := _carried(history, fleet):
        columns["width"] = [carried.get(d, 1.0) for d in ids]
    if len(set(history.cluster_of.values())) > 1:
        columns["cluster"] = [history.cluster_of.get(d, "") for d in ids]
    if devices is not None:
        known = devices.set_index("device")
        columns["examples"] = [int(v) for v in known["examples"].reindex(ids, fill_value=0)]
        columns["local test accuracy"] = list(known["accuracy"].reindex(ids))
    return Rows("device-table", "Devices", "State at the last event of the log.", columns)


def widths(history: History, fleet: Fleet) -> Panel | None:
    """Number of devices by sub-model width; None if all train the whole network."""
    if not (carried := _carried(history, fleet)):
        return None
    counts = Counter(carried.get(device, 1.0) for device in history.devices | set(carried))
    bars = Series(
        "devices", [f"{w:g}" for w in sorted(counts)], [counts[w] for w in sorted(counts)], "bar"
    )
    view = View("by width", "share of the network's width", "devices", [bars])
    return Panel("widths", "Sub-models", "Devices by the width of the network they train.", [view])


def _carried(history: History, fleet: Fleet) -> dict[int, float]:
    """Device -> sub-model width: the last one in the log, else the declared one."""
    return {**fleet.widths, **history.widths}


def _state(device: int, history: History, fleet: Fleet, busy: set[int], ended: bool) -> str:
    if device in history.retired:
        return "budget spent"
    if device in fleet.windows:
        period, windows = fleet.windows[device]
        if next_open(windows, period, history.now) > history.now:
            return "offline"
    if device in history.overdue:
        return "overdue"
    if device in busy:
        return "task open at the end" if ended else "working"
    return "lost" if device in history.lost else "idle"

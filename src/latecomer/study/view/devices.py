"""Panels by device: local test scores, sub-model widths, and a table of all devices."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from latecomer.fleet.availability import next_open
from latecomer.study.metric_names import LOWER_IS_BETTER, SHARES, label_of
from latecomer.study.view.history import History
from latecomer.study.view.panels import ORANGE, Panel, Rows, Series, View
from latecomer.study.view.timeline import Fleet, devices_in

# Columns of devices.csv beside the local test score.
COLUMNS = ("device", "late", "examples", "lineage")


def score_column(devices: pd.DataFrame) -> str | None:
    """The column of the local test score, named by its metric; None if there is none."""
    return next((str(column) for column in devices if column not in COLUMNS), None)


def device_scores(devices: pd.DataFrame | None) -> Panel | None:
    """Local test score of every device, the worst first; late devices are marked."""
    metric = None if devices is None else score_column(devices)
    if devices is None or metric is None or not devices[metric].notna().any():
        return None
    up = metric not in LOWER_IS_BETTER
    known = devices[devices[metric].notna()].sort_values([metric, "device"], ascending=[up, True])
    place = np.arange(1, len(known) + 1)
    late = known["late"].to_numpy() == 1
    series = [
        Series(name, place[mask].tolist(), known[metric][mask].tolist(), "dots", colour=k)
        for name, mask, k in (("other devices", ~late, 0), ("late devices", late, ORANGE))
        if mask.any()
    ]
    label, share = label_of(metric), metric in SHARES
    view = View("by device", "devices, worst first", label, series, unit_share=share)
    return Panel(
        "devices",
        f"Local test {label} by device",
        f"{_capital(label)} of the model that each device uses, on that device's held-back data.",
        [view],
    )


def scores_of_all(tables: Mapping[str, Sequence[pd.DataFrame]]) -> Panel | None:
    """Quantiles of the local test score over the devices of all seeds, one line per strategy."""
    lines = []
    metrics = [score_column(table) for some in tables.values() for table in some]
    metric = next((name for name in metrics if name), "accuracy")
    for label, some in tables.items():
        found = [t[metric].dropna().to_numpy() for t in some if metric in t]
        values = np.sort(np.concatenate(found)) if found else np.array([])
        if len(values):
            shares = np.linspace(0, 1, 101)
            from_worst = 1 - shares if metric in LOWER_IS_BETTER else shares
            lines.append(Series(label, shares.tolist(), np.quantile(values, from_worst).tolist()))
    if not lines:
        return None
    label, share = label_of(metric), metric in SHARES
    view = View("by device", "share of devices, worst first", label, lines, unit_share=share)
    return Panel(
        "devices",
        f"Local test {label} by device",
        f"{_capital(label)} of the model that each device uses, on that device's held-back data;"
        " devices of all seeds together. Left end: worst device; middle: median.",
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
        if metric := score_column(devices):
            columns[f"local test {label_of(metric)}"] = list(known[metric].reindex(ids))
    return Rows("device-table", "Devices", "State at the last event of the log.", columns)


def _capital(label: str) -> str:
    return label[:1].upper() + label[1:]


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

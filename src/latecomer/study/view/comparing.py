"""Panels of a comparison: results and costs of every strategy, mean and range over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from latecomer.study.view.history import History
from latecomer.study.view.panels import Panel, Series, View, bars
from latecomer.study.view.timeline import (
    STATE_COLOURS,
    STATES,
    Fleet,
    devices_in,
    spans_of,
    state_shares,
)

Names = Mapping[str, str]


def outcomes(table: pd.DataFrame, target: float | None) -> Panel | None:
    """Bars: time to the target accuracy, local test accuracy, privacy, compensation, clusters."""
    views = []
    if (v := _bars(table, {"seconds_to_target": "seconds"}, "virtual seconds")) is not None:
        to = "" if target is None else f" {target:g}"
        missing = [
            str(name)
            for name, some in table.groupby("strategy", sort=False)
            if some["seconds_to_target"].isna().any()
        ]
        note = f"Not reached with every seed: {', '.join(missing)}." if missing else ""
        views.append(_named(v, f"time to accuracy{to}", note))
    local = {
        "client_accuracy_mean": "mean over devices",
        "client_accuracy_late_mean": "late devices",
        "client_accuracy_worst": "worst device",
    }
    if (v := _bars(table, local, "local test accuracy", share=True)) is not None:
        views.append(_named(v, "local test accuracy"))
    for name, columns, y in (
        ("privacy spent", {"epsilon_mean": "mean", "epsilon_max": "largest"}, "epsilon"),
        ("compensated updates", {"compensation_count": "compensated"}, "updates"),
        ("server time for compensation", {"compensation_seconds": "seconds"}, "seconds"),
        (
            "clusters",
            {
                "clusters_final": "at the end",
                "clusters_splits": "splits",
                "clusters_merges": "merges",
            },
            "count",
        ),
    ):
        if (v := _bars(table, columns, y)) is not None:
            views.append(_named(v, name))
    if not views:
        return None
    return Panel(
        "outcomes",
        "Results and costs",
        "Bar: mean over seeds; whisker: lowest to highest.",
        views,
    )


def fleet_use(histories: Mapping[str, History], fleets: Mapping[str, Fleet]) -> Panel | None:
    """Share of device time in each state, averaged over devices and time, by strategy."""
    shares: dict[str, Sequence[float]] = {}
    for label, history in histories.items():
        if history.now > 0 and len(history.tasks):
            spans = spans_of(history, fleets[label])
            found = state_shares(spans, devices_in(history, fleets[label]), history.now)
            shares[label] = found.mean(axis=0).tolist()
    if not shares:
        return None
    series = [
        Series(STATES[s].name, list(shares), [v[s] for v in shares.values()], "bar", colour=colour)
        for s, colour in STATE_COLOURS.items()
        if any(v[s] for v in shares.values())
    ]
    view = View("share of time", "strategy", "share", series, unit_share=True, stacked=True)
    return Panel(
        "fleet-use",
        "Device utilisation",
        "Share of device time in each state, first seed of each strategy. The rest of a bar is"
        " idle time.",
        [view],
    )


def together(found: Mapping[str, Panel | None]) -> Panel | None:
    """One panel from the same panel of several strategies; view names start with the strategy."""
    some = {label: panel for label, panel in found.items() if panel is not None}
    if not some:
        return None
    first = next(iter(some.values()))
    views = [
        replace(view, name=f"{label}: {view.name}")
        for label, panel in some.items()
        for view in panel.views
    ]
    return Panel(first.id, first.title, f"{first.about} First seed of each strategy.", views)


def _bars(table: pd.DataFrame, columns: Names, y: str, share: bool = False) -> View | None:
    series = []
    for column, name in columns.items():
        if column not in table or not table[column].notna().any():
            continue
        groups = {str(k): g.tolist() for k, g in table.groupby("strategy", sort=False)[column]}
        # Without a bar where some seed has no value, such as a target that it did not reach.
        found = bars(name, {k: [] if np.isnan(v).any() else v for k, v in groups.items()})
        if np.nan_to_num(found.y).any():
            series.append(found)
    return View("", "strategy", y, series, unit_share=share) if series else None


def _named(view: View, name: str, note: str = "") -> View:
    return replace(view, name=name, note=note)

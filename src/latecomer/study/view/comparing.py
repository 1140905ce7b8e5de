"""Panels of a comparison: results and costs of every strategy, mean and range over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from latecomer.study.metric_names import SHARES, MainMetric
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


# View -> columns of compare.csv by the name of their bars, and the axis.
OUTCOMES: dict[str, tuple[Names, str]] = {
    "privacy spent": ({"epsilon_mean": "mean", "epsilon_max": "largest"}, "epsilon"),
    "compensated updates": ({"compensation_count": "compensated"}, "updates"),
    "server time for compensation": ({"compensation_seconds": "seconds"}, "seconds"),
    "clusters": (
        {"clusters_final": "at the end", "clusters_splits": "splits", "clusters_merges": "merges"},
        "count",
    ),
}


def outcomes(table: pd.DataFrame, target: float | None, main: MainMetric) -> Panel | None:
    """Bars: time to the target, local test score, privacy, compensation, clusters."""
    views = []
    local = f"client_{main.name}"
    by_metric: dict[str, tuple[Names, str]] = {
        f"time to {main.label}": ({"seconds_to_target": "seconds"}, "virtual seconds"),
        f"local test {main.label}": (
            {
                f"{local}_mean": "mean over devices",
                f"{local}_late_mean": "late devices",
                f"{local}_worst": "worst device",
            },
            f"local test {main.label}",
        ),
    }
    for name, (columns, y) in {**by_metric, **OUTCOMES}.items():
        if not (series := _bars(table, columns)):
            continue
        note = ""
        if "seconds_to_target" in columns:
            name += "" if target is None else f" {target:g}"
            missed = table[table["seconds_to_target"].isna()]["strategy"].unique()
            note = f"Not reached with every seed: {', '.join(missed)}." if len(missed) else ""
        share = f"{local}_mean" in columns and main.name in SHARES
        views.append(View(name, "strategy", y, series, unit_share=share, note=note))
    about = "Bar: mean over seeds; whisker: lowest to highest."
    return Panel("outcomes", "Results and costs", about, views) if views else None


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


def _bars(table: pd.DataFrame, columns: Names) -> list[Series]:
    """Mean and range of each column by strategy; columns without a value other than 0 are left out.

    There is no bar where some seed has no value, such as a target that it did not reach.
    """
    series = []
    for column, name in columns.items():
        if column in table and table[column].notna().any():
            groups = {str(k): g.tolist() for k, g in table.groupby("strategy", sort=False)[column]}
            found = bars(name, {k: [] if np.isnan(v).any() else v for k, v in groups.items()})
            if np.nan_to_num(found.y).any():
                series.append(found)
    return series

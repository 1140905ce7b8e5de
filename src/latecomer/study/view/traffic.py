"""Bytes up and down: over time, and at their peak."""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latecomer.study.view.clock import Clock
from latecomer.study.view.history import History
from latecomer.study.view.panels import Panel, Series, View

BINS = 120
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def traffic(history: History, clock: Clock) -> Panel | None:
    """What went over the network of one run."""
    horizon = history.now
    if horizon <= 0 or not len(history.down[0]):
        return None
    moved = {
        "up, from the devices": _per_bin(history.up, horizon),
        "down, to the devices": _per_bin(history.down, horizon),
    }
    unit, size = unit_for(max(float(b.sum()) for b in moved.values()))
    edges = clock.each(np.linspace(0, horizon, BINS + 1).tolist())
    total = [
        Series(name, edges, [0.0, *(np.cumsum(b) / size).tolist()]) for name, b in moved.items()
    ]
    per_second = {name: b * BINS / horizon for name, b in moved.items()}
    rate_unit, rate_size = unit_for(max(float(b.max()) for b in per_second.values()))
    rates, peaks = [], []
    for name, b in per_second.items():
        rates.append(Series(name, edges[:-1], (b / rate_size).tolist(), "step"))
        top = float(b.max() / rate_size)
        peaks.append(f"{name.split(',')[0]} {top:.3g} {rate_unit}/s")
    return Panel(
        "traffic",
        "What goes over the network",
        "All tasks sent and all updates that came in, refused ones too.",
        [
            View("in all", clock.title, unit, total),
            View(
                "per second",
                clock.title,
                f"{rate_unit}/s",
                rates,
                note=f"Mean of each {clock(horizon / BINS):.3g} {clock.unit}. Peaks:"
                f" {', '.join(peaks)}.",
            ),
        ],
    )


def traffic_of_all(up: Mapping[str, Sequence[float]], down: Mapping[str, Sequence[float]]) -> Panel:
    """Bytes of every strategy, over its seeds."""
    unit, size = unit_for(max(max(v) for some in (up, down) for v in some.values()))
    series = [
        Series(
            name,
            list(some),
            [float(np.mean(v)) / size for v in some.values()],
            "bar",
            low=[min(v) / size for v in some.values()],
            high=[max(v) / size for v in some.values()],
        )
        for name, some in (("up, from the devices", up), ("down, to the devices", down))
    ]
    view = View("in all", "strategy", unit, series)
    return Panel(
        "traffic",
        "What goes over the network",
        "In the whole run. Bar: mean over seeds; whisker: from the lowest to the highest.",
        [view],
    )


def unit_for(most: float) -> tuple[str, float]:
    return next(((name, size) for name, size in UNITS if most >= size), ("bytes", 1.0))


def _per_bin(moved: tuple["array[float]", "array[int]"], horizon: float) -> NDArray[np.float64]:
    times, sizes = np.array(moved[0], dtype=float), np.array(moved[1], dtype=float)
    place = np.minimum((times / horizon * BINS).astype(int), BINS - 1)
    return np.bincount(place, weights=sizes, minlength=BINS).astype(np.float64)

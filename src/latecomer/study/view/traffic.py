"""Network traffic: bytes up and down in total and per second of virtual time."""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latecomer.study.view.history import History
from latecomer.study.view.panels import Clock, Panel, Series, View, bars

BINS = 120
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def traffic(history: History, clock: Clock) -> Panel | None:
    """Uploaded and downloaded bytes of one run over virtual time."""
    horizon = history.now
    if horizon <= 0 or not len(history.down[0]):
        return None
    moved = {
        "upload": _per_bin(history.up, horizon),
        "download": _per_bin(history.down, horizon),
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
        peaks.append(f"{name} {b.max() / rate_size:.3g} {rate_unit}/s")
    return Panel(
        "traffic",
        "Network traffic",
        "Upload: updates received from devices, refused ones included. Download: models sent to"
        " devices.",
        [
            View("total", clock.title, unit, total),
            View(
                "per second",
                clock.title,
                f"{rate_unit}/s",
                rates,
                note=f"Means over {clock(horizon / BINS):.3g} {clock.unit}. Peaks:"
                f" {', '.join(peaks)}.",
            ),
        ],
    )


def traffic_of_all(up: Mapping[str, Sequence[float]], down: Mapping[str, Sequence[float]]) -> Panel:
    """Bytes of a whole run, mean and range over seeds, by strategy."""
    unit, size = unit_for(max(max(v) for some in (up, down) for v in some.values()))
    series = [bars("upload", up, size), bars("download", down, size)]
    view = View("total", "strategy", unit, series)
    return Panel(
        "traffic",
        "Network traffic",
        "Total of a run. Bar: mean over seeds; whisker: lowest to highest.",
        [view],
    )


def unit_for(largest: float) -> tuple[str, float]:
    """The unit for values up to `largest` bytes: its name and its bytes."""
    return next(((name, size) for name, size in UNITS if largest >= size), ("bytes", 1.0))


def _per_bin(moved: tuple["array[float]", "array[int]"], horizon: float) -> NDArray[np.float64]:
    times, sizes = np.array(moved[0], dtype=float), np.array(moved[1], dtype=float)
    place = np.minimum((times / horizon * BINS).astype(int), BINS - 1)
    return np.bincount(place, weights=sizes, minlength=BINS).astype(np.float64)

"""Staleness of arriving updates: distribution, and aggregation weight by staleness."""

from collections.abc import Mapping

import numpy as np

from latecomer.study.view.history import History
from latecomer.study.view.panels import Panel, Series, View, thinned

MAX_BARS = 60


def staleness(history: History) -> Panel | None:
    """Histogram of staleness in one run, and the mean weight by staleness."""
    if not history.staleness:
        return None
    views = [
        View(
            "distribution",
            "staleness (commits)",
            "updates",
            [Series("updates", *_histogram(history.staleness), "bar")],
        )
    ]
    if (weights := _weights("weight", history)) is not None:
        views.append(View("weight", "staleness (commits)", "weight", [weights]))
    return Panel(
        "staleness",
        "Staleness and weight of updates",
        "Staleness: commits since the model version that the update was trained from. Weight: the"
        " strategy's aggregation weight; line: mean; band: smallest to largest.",
        views,
    )


def staleness_of_all(histories: Mapping[str, History]) -> Panel | None:
    """Cumulative distribution of staleness and relative mean weight, one line per strategy."""
    some = {label: h for label, h in histories.items() if h.staleness}
    if not some:
        return None
    longest = max(max(h.staleness) for h in some.values())
    lines = [Series(label, *_up_to(h.staleness, longest), "step") for label, h in some.items()]
    x_title = "staleness (commits)"
    log = longest > 100
    views = [View("cumulative", x_title, "share of updates", lines, unit_share=True, log_x=log)]
    weights = [
        found
        for label, h in some.items()
        if (found := _weights(label, h, relative=True)) is not None
    ]
    if weights:
        y_title = "mean weight / largest"
        views.append(View("weight", x_title, y_title, weights, unit_share=True, log_x=log))
    return Panel(
        "staleness",
        "Staleness and weight of updates",
        "First seed of each strategy. Cumulative: share of updates with at most this staleness."
        " Weight: mean aggregation weight relative to the strategy's largest.",
        views,
    )


def _histogram(counts: Mapping[int, int]) -> tuple[list[object], list[int]]:
    top = max(counts)
    if top < MAX_BARS:
        return list(range(top + 1)), [counts.get(s, 0) for s in range(top + 1)]
    width = -(-(top + 1) // MAX_BARS)
    bins = [0] * (top // width + 1)
    for value, count in counts.items():
        bins[value // width] += count
    return [k * width + (width - 1) / 2 for k in range(len(bins))], bins


def _up_to(counts: Mapping[int, int], longest: int) -> tuple[list[float], list[float]]:
    values = sorted(counts)
    total = np.cumsum([counts[v] for v in values])
    x, share = thinned([float(v) for v in values], (total / total[-1]).tolist(), limit=200)
    return [*x, float(longest)], [*share, 1.0]


def _weights(name: str, history: History, relative: bool = False) -> Series | None:
    """Mean weight by staleness with its range, in at most MAX_BARS bins."""
    stale, weight = (
        np.array(history.weight_by_staleness[0]),
        np.array(history.weight_by_staleness[1]),
    )
    finite = np.isfinite(weight)
    stale, weight = stale[finite], weight[finite]
    if not len(stale):
        return None
    width = max(1, -(-(int(stale.max()) + 1) // MAX_BARS))
    bins = stale // width
    x, y, low, high = [], [], [], []
    for b in np.unique(bins).tolist():
        inside = weight[bins == b]
        x.append(b * width + (width - 1) / 2)
        y.append(float(inside.mean()))
        low.append(float(inside.min()))
        high.append(float(inside.max()))
    if relative:
        top = max(map(abs, y)) or 1.0
        return Series(name, x, [v / top for v in y])
    return Series(name, x, y, low=low, high=high)

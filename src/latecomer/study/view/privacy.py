"""Privacy budget spent: epsilon of each device, and its mean and maximum over time."""

from latecomer.study.view.history import History
from latecomer.study.view.panels import ORANGE, Clock, Mark, Panel, Series, View, thinned


def privacy(history: History, budget: float, clock: Clock) -> Panel | None:
    """None for a run without differential privacy; `budget` 0: no limit."""
    if not history.spent:
        return None
    marks = [Mark(budget, "budget", level=True)] if budget > 0 else []
    order = sorted(history.spent, key=lambda device: (-history.spent[device], device))
    groups = (
        ("budget left", [d for d in order if d not in history.retired], 0),
        ("budget spent", [d for d in order if d in history.retired], ORANGE),
    )
    place = {device: k + 1 for k, device in enumerate(order)}
    bars = [
        Series(name, [place[d] for d in some], [history.spent[d] for d in some], "bar", colour=k)
        for name, some, k in groups
        if some
    ]
    views = [
        View("by device", "devices, most spent first", "epsilon", bars, marks),
        View("over virtual time", clock.title, "epsilon", _over_time(history, clock), marks),
    ]
    return Panel(
        "privacy",
        "Privacy budget spent",
        "Total epsilon of each device, by its own ledger. A device whose budget is spent gets no"
        " more tasks.",
        views,
    )


def _over_time(history: History, clock: Clock) -> list[Series]:
    """Mean epsilon over the devices that have sent an update, and the largest."""
    spent: dict[int, float] = {}
    total, largest = 0.0, 0.0
    means, tops = [], []
    for device, epsilon in zip(history.spending[1], history.spending[2], strict=True):
        total += epsilon - spent.get(device, 0.0)
        spent[device] = epsilon
        largest = max(largest, epsilon)
        means.append(total / len(spent))
        tops.append(largest)
    x, mean, top = thinned(clock.each(history.spending[0]), means, tops)
    return [Series("mean over devices", x, mean), Series("largest", x, top, dash=1, colour=ORANGE)]

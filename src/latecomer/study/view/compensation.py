"""Late updates repaired: how many, at what cost, whether it helped, and where it ended."""

from collections.abc import Mapping
from typing import Any

from latecomer.study.view.clock import Clock
from latecomer.study.view.history import History
from latecomer.study.view.panels import Mark, Panel, Series, View, thinned


def repairs(history: History, clock: Clock) -> Panel | None:
    """None for a run in which nothing was repaired or judged."""
    views = []
    switches = [Mark(clock(s["time"]), _end(s)) for s in history.switches if "error_stale" in s]
    if history.repairs:
        times = clock.each(event["time"] for event in history.repairs)
        useful, seconds, count, total = [], [], 0, 0.0
        for event in history.repairs:
            count += event.get("gamma", 1.0) > 0
            total += event.get("seconds", 0.0)
            useful.append(count)
            seconds.append(total)
        x, counts, spent = thinned(times, useful, seconds)
        views.append(
            View("count", clock.title, "updates", [Series("repaired", x, counts, "step")], switches)
        )
        if total:
            line = Series("seconds of the server", x, spent, "step", colour=1)
            views.append(View("server time", clock.title, "seconds", [line], switches))
    judged = [e for e in history.judgements if e.get("error_estimate") is not None]
    if judged:
        x, estimate, stale = thinned(
            clock.each(e["time"] for e in judged),
            [e["error_estimate"] for e in judged],
            [e["error_stale"] for e in judged],
        )
        lines = [
            Series("estimated update", x, estimate, "dots", colour=2),
            Series("late update as it came (vanilla)", x, stale, "dots", colour=1),
        ]
        views.append(View("error", clock.title, "mean absolute error", lines, switches))
    if not views:
        return None
    return Panel(
        "compensation",
        "Late updates repaired",
        "An estimate is judged by a later update of the same device: its error beside that of the"
        " late update as it came. Repair ends where it does harm.",
        views,
    )


def _end(switch: Mapping[str, Any]) -> str:
    below = switch.get("below")
    return "switched off" if below is None else f"off below {below:g} stale"

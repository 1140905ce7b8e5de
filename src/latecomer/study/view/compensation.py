"""Staleness compensation over time: count, server seconds, estimation error, switch-off."""

from collections.abc import Mapping
from typing import Any

from latecomer.study.view.history import History
from latecomer.study.view.panels import Clock, Mark, Panel, Series, View, thinned


def compensation(history: History, clock: Clock) -> Panel | None:
    """None for a run without compensated updates and without validations of them."""
    views = []
    switches = [Mark(clock(s["time"]), _end(s)) for s in history.switch_offs if "error_stale" in s]
    if history.compensations:
        times = clock.each(event["time"] for event in history.compensations)
        useful, seconds, count, total = [], [], 0, 0.0
        for event in history.compensations:
            count += event.get("gamma", 1.0) > 0
            total += event.get("seconds", 0.0)
            useful.append(count)
            seconds.append(total)
        x, counts, spent = thinned(times, useful, seconds)
        views.append(
            View(
                "count",
                clock.title,
                "updates",
                [Series("compensated", x, counts, "step")],
                switches,
            )
        )
        if total:
            line = Series("server seconds", x, spent, "step", colour=1)
            views.append(View("server time", clock.title, "seconds", [line], switches))
    validated = [e for e in history.validations if e.get("error_estimate") is not None]
    if validated:
        x, estimate, stale = thinned(
            clock.each(e["time"] for e in validated),
            [e["error_estimate"] for e in validated],
            [e["error_stale"] for e in validated],
        )
        lines = [
            Series("compensated update", x, estimate, "dots", colour=2),
            Series("stale update without compensation", x, stale, "dots", colour=1),
        ]
        views.append(View("error", clock.title, "mean absolute error", lines, switches))
    if not views:
        return None
    return Panel(
        "compensation",
        "Staleness compensation",
        "A compensated update is validated by the device's next update: its error is compared with"
        " that of the stale update. Compensation is switched off where it increases the error.",
        views,
    )


def _end(switch: Mapping[str, Any]) -> str:
    below = switch.get("below")
    return "switched off" if below is None else f"off below staleness {below:g}"

"""How well the model does: over virtual time, over updates, and by class."""

from collections.abc import Collection, Mapping, Sequence

import pandas as pd

from latecomer.study.view.clock import Clock
from latecomer.study.view.panels import ORANGE, Panel, Series, View, curve

SHARES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "accuracy_affected": "accuracy on affected classes",
}
Runs = Mapping[str, Sequence[pd.DataFrame]]  # strategy -> metrics of its seeds


def learning(metrics: pd.DataFrame, clock: Clock) -> Panel:
    """The curves of one run."""
    shown = {c: name for c, name in SHARES.items() if _has(metrics, c)}
    views = [
        View(f"over {word}", title, "share", _lines(metrics, x, shown), unit_share=True)
        for word, title, x in _axes(metrics, clock)
    ]
    if _has(metrics, "loss"):
        word, title, x = _axes(metrics, clock)[0]
        lines = _lines(metrics, x, {"loss": "loss"})
        views.append(View(f"loss over {word}", title, "cross-entropy", lines))
    return Panel(
        "learning",
        "How well it learns",
        "On the central test set. Each point is an evaluation.",
        views,
    )


def classes(metrics: pd.DataFrame, affected: Collection[str], clock: Clock) -> Panel | None:
    """F1 of each class; the affected ones are marked."""
    names = [c for c in map(str, metrics) if c.startswith("f1_") and _has(metrics, c)]
    if not names:
        return None
    last = metrics.iloc[-1]
    views = []
    word, title, x = _axes(metrics, clock)[0]
    bars = [
        Series(label, [_class(c, affected) for c in some], [last[c] for c in some], "bar", colour=k)
        for label, some, k in (
            ("other classes", [c for c in names if c[3:] not in affected], 0),
            ("affected classes", [c for c in names if c[3:] in affected], ORANGE),
        )
        if some
    ]
    views.append(View("at the end", "class", "F1", bars, unit_share=True))
    if len(metrics) > 1:
        lines = [
            curve(_class(c, affected), x, list(metrics[c]), dash=2 if c[3:] in affected else None)
            for c in names
        ]
        views.append(View(f"over {word}", title, "F1", lines, unit_share=True))
    about = "F1 on the central test set."
    if affected:
        about += " Affected classes are those that the late devices hold (fleet.late.classes)."
    return Panel("classes", "F1 by class", about, views)


def learning_of_all(runs: Runs, clock: Clock) -> Panel:
    """The curves of a comparison: the mean over seeds as a line, their range as a band."""
    views = []
    first = next(iter(runs.values()))[0]
    for column, name in SHARES.items():
        if not all(_has(run, column) for some in runs.values() for run in some):
            continue
        for axis, (word, title, _) in zip(
            ("virtual_seconds", "updates"), _axes(first, clock), strict=True
        ):
            lines = [
                _band(label, some, axis, column, clock if axis == "virtual_seconds" else None)
                for label, some in runs.items()
            ]
            views.append(View(f"{name} over {word}", title, name, lines, unit_share=True))
    return Panel(
        "learning",
        "How well each learns",
        "On the central test set. Line: mean over seeds; band: from the lowest to the highest.",
        views,
    )


def classes_of_all(runs: Runs, affected: Collection[str]) -> Panel | None:
    """F1 of each class at the end, for every strategy."""
    columns = [str(c) for c in next(iter(runs.values()))[0] if str(c).startswith("f1_")]
    series = []
    for label, some in runs.items():
        last = pd.DataFrame([run.iloc[-1] for run in some]).reindex(columns=columns)
        last = last.apply(pd.to_numeric)
        series.append(
            Series(
                label,
                [_class(c, affected) for c in columns],
                list(last.mean()),
                "bar",
                low=list(last.min()),
                high=list(last.max()),
            )
        )
    if not columns:
        return None
    about = "At the end. Bar: mean over seeds; whisker: from the lowest to the highest."
    if affected:
        about += " Affected classes are those that the late devices hold."
    view = View("at the end", "class", "F1", series, unit_share=True)
    return Panel("classes", "F1 by class", about, [view])


def _axes(metrics: pd.DataFrame, clock: Clock) -> list[tuple[str, str, list[float]]]:
    return [
        ("virtual time", clock.title, clock.each(metrics["virtual_seconds"])),
        ("client updates", "client updates", list(metrics["updates"])),
    ]


def _lines(metrics: pd.DataFrame, x: Sequence[float], shown: Mapping[str, str]) -> list[Series]:
    return [
        curve(name, x, list(metrics[column]), dash=int(column == "accuracy_affected"))
        for column, name in shown.items()
    ]


def _band(
    label: str, runs: Sequence[pd.DataFrame], axis: str, column: str, clock: Clock | None
) -> Series:
    end = min(run[axis].iloc[-1] for run in runs)
    grid = pd.Index(sorted({x for run in runs for x in run[axis] if x <= end}))
    aligned = pd.DataFrame(
        {
            k: run.groupby(axis)[column].last().reindex(grid, method="ffill")
            for k, run in enumerate(runs)
        }
    )
    x = list(grid) if clock is None else clock.each(grid)
    mean = list(aligned.mean(axis=1))
    if len(runs) == 1:
        return curve(label, x, mean)
    return curve(label, x, mean, list(aligned.min(axis=1)), list(aligned.max(axis=1)))


def _class(column: str, affected: Collection[str]) -> str:
    name = column.removeprefix("f1_")
    return f"{name} (affected)" if name in affected else name


def _has(metrics: pd.DataFrame, column: str) -> bool:
    return column in metrics and bool(metrics[column].notna().any())

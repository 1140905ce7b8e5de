"""Learning curves on the central test set over virtual time and client updates, and F1 by class."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import pandas as pd

from latecomer.study.metric_names import SHARES, device_columns, label_of, metric_columns
from latecomer.study.view.panels import ORANGE, Clock, Panel, Series, View, bars, curve

LATE_CLASSES = " Late classes are those of fleet.late.classes."
Runs = Mapping[str, Sequence[pd.DataFrame]]  # strategy -> metrics of its seeds


def learning(metrics: pd.DataFrame, clock: Clock, loss: str = "cross-entropy") -> Panel:
    """All metrics of one run: those between 0 and 1 together, each other one by itself.

    `loss` is the name of the loss.
    """
    shown = {c: name for c, name in SHARES.items() if _has(metrics, c)}
    views = [
        View(f"over {axis}", title, "score", _lines(metrics, x, shown), unit_share=True)
        for axis, title, x in _axes(metrics, clock)
        if shown
    ]
    axis, title, x = _axes(metrics, clock)[0]
    others = [c for c in metric_columns(metrics) if c not in (*SHARES, "loss")]
    on_devices = [c for c in device_columns(metrics) if c not in others]
    for column in (c for c in ("loss", *others, *on_devices) if _has(metrics, c)):
        lines = _lines(metrics, x, {column: label_of(column)})
        y = loss if column == "loss" else label_of(column)
        views.append(View(f"{label_of(column)} over {axis}", title, y, lines))
    return Panel(
        "learning",
        "Learning curves",
        "On the central test set. Each point is an evaluation."
        + (" client_...: mean over devices, each on its local test data." if on_devices else ""),
        views,
    )


def classes(metrics: pd.DataFrame, late: Collection[str], clock: Clock) -> Panel | None:
    """F1 of each class at the end and over time; late classes are marked."""
    names = [c for c in map(str, metrics) if c.startswith("f1_") and _has(metrics, c)]
    if not names:
        return None
    last = metrics.iloc[-1]
    views = []
    axis, title, x = _axes(metrics, clock)[0]
    bars = [
        Series(label, [_class(c, late) for c in some], [last[c] for c in some], "bar", colour=k)
        for label, some, k in (
            ("other classes", [c for c in names if c[3:] not in late], 0),
            ("late classes", [c for c in names if c[3:] in late], ORANGE),
        )
        if some
    ]
    views.append(View("at the end", "class", "F1", bars, unit_share=True))
    if len(metrics) > 1:
        lines = [
            curve(_class(c, late), x, list(metrics[c]), dash=2 if c[3:] in late else -1)
            for c in names
        ]
        views.append(View(f"over {axis}", title, "F1", lines, unit_share=True))
    about = f"F1 on the central test set.{LATE_CLASSES if late else ''}"
    return Panel("classes", "F1 by class", about, views)


def learning_of_all(runs: Runs, clock: Clock) -> Panel:
    """Learning curves of every strategy: mean over seeds as a line, range as a band."""
    views = []
    first = next(iter(runs.values()))[0]
    for column in metric_columns(first):
        name = label_of(column)
        if not all(_has(run, column) for some in runs.values() for run in some):
            continue
        for x, (axis, title, _) in zip(
            ("virtual_seconds", "updates"), _axes(first, clock), strict=True
        ):
            lines = [
                band(label, some, x, column, clock.each if x == "virtual_seconds" else list)
                for label, some in runs.items()
            ]
            share = column in SHARES
            views.append(View(f"{name} over {axis}", title, name, lines, unit_share=share))
    return Panel(
        "learning",
        "Learning curves",
        "On the central test set. Line: mean over seeds; band: lowest to highest.",
        views,
    )


def classes_of_all(runs: Runs, late: Collection[str]) -> Panel | None:
    """F1 of each class at the end, mean and range over seeds, by strategy."""
    columns = [str(c) for c in next(iter(runs.values()))[0] if str(c).startswith("f1_")]
    series = []
    for label, some in runs.items():
        last = pd.DataFrame([run.iloc[-1] for run in some]).reindex(columns=columns)
        last = last.apply(pd.to_numeric)
        series.append(bars(label, {_class(c, late): last[c].tolist() for c in columns}))
    if not columns:
        return None
    about = (
        "On the central test set at the end. Bar: mean over seeds; whisker: lowest to highest."
        f"{LATE_CLASSES if late else ''}"
    )
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


def band(
    label: str,
    runs: Sequence[pd.DataFrame],
    axis: str,
    column: str,
    scale: Callable[[Iterable[float]], list[float]] = list,
) -> Series:
    """A column of the runs over `axis`: mean as a line, range as a band; `scale` maps the axis."""
    found = mean_and_range(runs, axis, column)
    ends = (list(found["low"]), list(found["high"])) if len(runs) > 1 else (None, None)
    return curve(label, scale(found["x"]), list(found["mean"]), *ends)


def mean_and_range(runs: Sequence[pd.DataFrame], axis: str, column: str) -> pd.DataFrame:
    """`x`, `mean`, `low`, `high` of a column over runs, up to the end of the shortest run."""
    end = min(run[axis].iloc[-1] for run in runs)
    grid = pd.Index(sorted({x for run in runs for x in run[axis] if x <= end}), name="x")
    last = [run.groupby(axis)[column].last().reindex(grid, method="ffill") for run in runs]
    aligned = pd.concat(last, axis=1)
    found = {"mean": aligned.mean(axis=1), "low": aligned.min(axis=1), "high": aligned.max(axis=1)}
    return pd.DataFrame(found).reset_index()


def _class(column: str, late: Collection[str]) -> str:
    name = column.removeprefix("f1_")
    return f"{name} (late class)" if name in late else name


def _has(metrics: pd.DataFrame, column: str) -> bool:
    return column in metrics and bool(metrics[column].notna().any())

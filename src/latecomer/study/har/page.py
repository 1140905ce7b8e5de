"""report.html of the study: its findings, and the plots behind them."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.study.har.findings import DECISIONS
from latecomer.study.har.skew import Skew
from latecomer.study.view.page import report_page
from latecomer.study.view.panels import Document, Panel, Rows, Series, View, curve

Curves = Mapping[str, Sequence[pd.DataFrame]]


def page(title: str, markdown: str, panels: Iterable[Panel]) -> str:
    """One self-contained page: the plots, the tables of the findings, then their words."""
    named = [
        Panel(f"{panel.id}-{number}", panel.title, panel.about, panel.views)
        for number, panel in enumerate(panels)
    ]
    tables, words = parted(markdown)
    return report_page(Document(title, "", {}, named, tables, {"Findings": words}))


def convergence(curves: Curves, axis: tuple[str, str], what: str, column: str) -> Panel:
    """Mean over seeds as a line, their range as a band."""
    name = {"macro_f1": "macro-F1"}.get(column, f"F1 of {column.removeprefix('f1_')}")
    series = []
    for label, runs in curves.items():
        band = spread(runs, axis[0], column)
        x, mean, low, high = (band[part].tolist() for part in ("x", "mean", "low", "high"))
        series.append(curve(label, x, mean, low, high))
    view = View(name, axis[1], name, series, unit_share=True)
    return Panel(
        "convergence",
        f"{what}: {name} over {axis[1]}",
        "Line: mean over seeds; band: from the lowest to the highest.",
        [view],
    )


def spread(runs: Sequence[pd.DataFrame], axis: str, column: str) -> pd.DataFrame:
    """Mean, lowest and highest over runs, as far as the shortest of them goes."""
    end = min(run[axis].iloc[-1] for run in runs)
    grid = pd.Index(sorted({x for run in runs for x in run[axis] if x <= end}))
    aligned = pd.DataFrame(
        {
            k: run.groupby(axis)[column].last().reindex(grid, method="ffill")
            for k, run in enumerate(runs)
        }
    )
    return pd.DataFrame(
        {
            "x": grid.to_numpy(),
            "mean": aligned.mean(axis=1).to_numpy(),
            "low": aligned.min(axis=1).to_numpy(),
            "high": aligned.max(axis=1).to_numpy(),
        }
    )


def factor_title(factor: str) -> str:
    return f"Asynchronous, {DECISIONS[factor]}"


def labels(counts: pd.DataFrame) -> Panel:
    """Who has how many examples of which class."""
    devices = [str(device) for device in counts.index]
    series = [Series(str(name), devices, counts[name].tolist(), "bar") for name in counts.columns]
    view = View("examples", "device", "examples", series, stacked=True)
    about = "Examples of all parts; replicas of augmentation are not counted."
    return Panel("labels", "Label distribution per device", about, [view])


def skews(skew: Skew, local: Skew) -> Panel:
    """How much of a class's variance lies between devices, under both scalings."""
    series = [
        Series(name, list(found.by_class), list(found.by_class.values()), "bar")
        for name, found in (("global scaling", skew), ("local scaling", local))
    ]
    view = View("share", "class", "share (0: alike everywhere)", series)
    about = "Share of the variance within a class that lies between devices."
    return Panel("skew", "Feature skew", about, [view])


def boxes(values: Mapping[int, NDArray[np.float32]], name: str) -> Panel:
    """One feature of one class, device by device (Figure 5 of the paper)."""
    devices = [str(device) for device in values]
    low, middle, high = (
        [float(np.quantile(some, share)) for some in values.values()] for share in (0.1, 0.5, 0.9)
    )
    view = View(
        "value",
        "device",
        "after global scaling",
        [Series("median", devices, middle, "bar", low=low, high=high)],
    )
    about = "Bar: median; whisker: from the lowest tenth to the highest."
    return Panel("feature", f"Feature skew per device: {name}", about, [view])


def parted(markdown: str) -> tuple[list[Rows], str]:
    """The tables of a text, each under the heading above it, and the text without them."""
    tables: list[Rows] = []
    words: list[str] = []
    heading = "Results"
    for block in markdown.strip().split("\n\n"):
        if block.startswith("# "):
            continue  # the page has its own title
        if block.startswith("## "):
            heading = block[3:]
        if block.startswith("| "):
            lines = [line.replace("**", "") for line in block.split("\n")]
            # Between the outer bars: a cell may be empty.
            head, _, *rows = [line[2:-2].split(" | ") for line in lines]
            columns = {name: [row[i] for row in rows] for i, name in enumerate(head)}
            tables.append(Rows(f"table-{len(tables)}", heading, "", columns))
        else:
            words.append(block.replace("**", "").replace("\\*", "*"))
    return tables, "\n\n".join(words)

"""report.html of the study: plots, and the tables and text of findings.md."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.study.har.findings import DECISIONS
from latecomer.study.har.skew import Skew
from latecomer.study.view.page import report_page
from latecomer.study.view.panels import Document, Panel, Rows, Series, View, curve

Curves = Mapping[str, Sequence[pd.DataFrame]]


def study_page(title: str, markdown: str, panels: Iterable[Panel]) -> str:
    """One self-contained page: the plots, the tables of the findings, then their text."""
    numbered = [
        Panel(f"{panel.id}-{number}", panel.title, panel.about, panel.views)
        for number, panel in enumerate(panels)
    ]
    tables, text = split_tables(markdown)
    return report_page(Document(title, "", {}, numbered, tables, {"Findings": text}))


def convergence_panel(curves: Curves, axis: tuple[str, str], title: str, column: str) -> Panel:
    """A score over `axis` (column, name): a line and a band per entry of `curves`."""
    name = {"macro_f1": "macro-F1"}.get(column, f"F1 of {column.removeprefix('f1_')}")
    series = []
    for label, runs in curves.items():
        band = mean_and_range(runs, axis[0], column)
        x, mean, low, high = (band[part].tolist() for part in ("x", "mean", "low", "high"))
        series.append(curve(label, x, mean, low, high))
    view = View(name, axis[1], name, series, unit_share=True)
    return Panel(
        "convergence",
        f"{title}: {name} over {axis[1]}",
        "Line: mean over seeds; band: minimum to maximum over seeds.",
        [view],
    )


def mean_and_range(runs: Sequence[pd.DataFrame], axis: str, column: str) -> pd.DataFrame:
    """`x`, `mean`, `low`, `high` of a column over runs, up to the end of the shortest run."""
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


def label_panel(counts: pd.DataFrame) -> Panel:
    """Examples of each class on each device, as stacked bars."""
    devices = [str(device) for device in counts.index]
    series = [Series(str(name), devices, counts[name].tolist(), "bar") for name in counts.columns]
    view = View("examples", "device", "examples", series, stacked=True)
    about = "Training, validation and test examples, without replicas of augmentation."
    return Panel("labels", "Label distribution per device", about, [view])


def skew_panel(skew: Skew, local: Skew) -> Panel:
    """The feature skew of each class under global and local scaling."""
    series = [
        Series(name, list(scaled.by_class), list(scaled.by_class.values()), "bar")
        for name, scaled in (("global scaling", skew), ("local scaling", local))
    ]
    view = View("share", "class", "share (0: equal on all devices)", series)
    about = "Share of the variance within a class that lies between devices."
    return Panel("skew", "Feature skew", about, [view])


def feature_panel(values: Mapping[int, NDArray[np.float32]], name: str) -> Panel:
    """Quantiles of one feature of one class on each device (Figure 5 of the paper)."""
    devices = [str(device) for device in values]
    low, middle, high = (
        [float(np.quantile(v, share)) for v in values.values()] for share in (0.1, 0.5, 0.9)
    )
    view = View(
        "value",
        "device",
        "after global scaling",
        [Series("median", devices, middle, "bar", low=low, high=high)],
    )
    about = "Bar: median; whisker: from the 10% to the 90% quantile."
    return Panel("feature", f"Feature skew per device: {name}", about, [view])


def split_tables(markdown: str) -> tuple[list[Rows], str]:
    """The tables of a Markdown text, titled by the heading above them, and the rest of it."""
    tables: list[Rows] = []
    text: list[str] = []
    heading = "Results"
    for block in markdown.strip().split("\n\n"):
        if block.startswith("# "):
            continue  # the page shows the title
        if block.startswith("## "):
            heading = block[3:]
        if block.startswith("| "):
            lines = [line.replace("**", "") for line in block.split("\n")]
            # Without the outer bars; a cell may be empty.
            head, _, *rows = [line[2:-2].split(" | ") for line in lines]
            columns = {name: [row[i] for row in rows] for i, name in enumerate(head)}
            tables.append(Rows(f"table-{len(tables)}", heading, "", columns))
        else:
            text.append(block.replace("**", "").replace("\\*", "*"))
    return tables, "\n\n".join(text)

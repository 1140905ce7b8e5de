"""report.html of the study: plots, and the tables and text of findings.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.study.har.findings import Block
from latecomer.study.har.skew import Skew
from latecomer.study.view.learning import band
from latecomer.study.view.page import report_page
from latecomer.study.view.panels import Document, Panel, Rows, Series, View

Curves = Mapping[str, Sequence[pd.DataFrame]]


def study_page(blocks: Sequence[Block], panels: Iterable[Panel]) -> str:
    """One self-contained page: the plots, the tables of the findings, then their text."""
    numbered = [replace(panel, id=f"{panel.id}-{k}") for k, panel in enumerate(panels)]
    title, heading, tables, text = "", "", list[Rows](), list[str]()
    for block in blocks:
        if isinstance(block, str):
            if block.startswith("# "):
                title = block[2:]  # shown above the page
                continue
            heading = block[3:] if block.startswith("## ") else heading
            text.append(block.replace("\\*", "*"))
        else:
            columns = {str(name): [v.replace("**", "") for v in block[name]] for name in block}
            tables.append(Rows(f"table-{len(tables)}", heading, "", columns))
    texts = {"Findings": "\n\n".join(text)}
    return report_page(Document(title, "", {}, numbered, tables, texts))


def convergence_panel(curves: Curves, axis: tuple[str, str], title: str, column: str) -> Panel:
    """A score over `axis` (column, name): a line and a band per entry of `curves`."""
    name = {"macro_f1": "macro-F1"}.get(column, f"F1 of {column.removeprefix('f1_')}")
    series = [band(label, runs, axis[0], column) for label, runs in curves.items()]
    return Panel(
        "convergence",
        f"{title}: {name} over {axis[1]}",
        "Line: mean over seeds; band: minimum to maximum over seeds.",
        [View(name, axis[1], name, series, unit_share=True)],
    )


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

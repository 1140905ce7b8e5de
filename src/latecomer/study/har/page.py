"""report.html of the study: its findings, and the plots behind them."""

import html
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from latecomer.study.har.findings import DECISIONS
from latecomer.study.har.skew import Skew
from latecomer.study.report import COLOURS, PAGE, embed, new_figure

LONG = 60  # characters, from which a cell is prose

Curves = Mapping[str, Sequence[pd.DataFrame]]


def page(title: str, markdown: str, figures: Iterable[go.Figure]) -> str:
    """One self-contained page: the plots, then the findings."""
    return PAGE.format(
        title=html.escape(title), body=_as_html(markdown) + "<h2>Plots</h2>" + embed(figures)
    )


def convergence(curves: Curves, axis: tuple[str, str], what: str, column: str) -> go.Figure:
    """Mean over seeds as a line, their range as a band."""
    name = {"macro_f1": "macro-F1"}.get(column, column.removeprefix("f1_").join(["F1 of ", ""]))
    figure = new_figure(f"{what}: {name} over {axis[1]}<br>line: mean, band: range", axis[1], name)
    for (label, runs), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        band = spread(runs, axis[0], column)
        figure.add_scatter(
            x=[*band["x"], *reversed(band["x"].tolist())],
            y=[*band["high"], *reversed(band["low"].tolist())],
            fill="toself",
            fillcolor=colour,
            opacity=0.2,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=label,
        )
        figure.add_scatter(
            x=band["x"].tolist(),
            y=band["mean"].tolist(),
            name=label,
            line={"color": colour},
            legendgroup=label,
        )
    return figure


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


def labels(counts: pd.DataFrame) -> go.Figure:
    """Who has how many examples of which class."""
    figure = new_figure("Label distribution per device", "device", "examples")
    for name, colour in zip(counts.columns, cycle(COLOURS), strict=False):
        figure.add_bar(
            x=[str(device) for device in counts.index],
            y=counts[name].tolist(),
            name=name,
            marker_color=colour,
        )
    figure.update_layout(barmode="stack")
    return figure


def skews(skew: Skew, local: Skew) -> go.Figure:
    """How much of a class's variance lies between devices, under both scalings."""
    figure = new_figure(
        "Feature skew: share of the variance within a class that lies between devices",
        "class",
        "share (0: alike everywhere)",
    )
    for name, found, colour in (
        ("global scaling", skew, COLOURS[0]),
        ("local scaling", local, COLOURS[1]),
    ):
        figure.add_bar(
            x=list(found.by_class), y=list(found.by_class.values()), name=name, marker_color=colour
        )
    figure.update_layout(barmode="group")
    return figure


def boxes(values: Mapping[int, NDArray[np.float32]], name: str) -> go.Figure:
    """One feature of one class, device by device (Figure 5 of the paper)."""
    figure = new_figure(f"Feature skew per device: {name}", "device", "after global scaling")
    for (device, some), colour in zip(values.items(), cycle(COLOURS), strict=False):
        figure.add_box(
            y=some.tolist(),
            name=str(device),
            marker_color=colour,
            showlegend=False,
            boxpoints=False,
        )
    return figure


def _as_html(text: str) -> str:
    """Just as much Markdown as `findings` writes: headings, lists, tables, paragraphs."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if block.startswith("# "):
            continue  # the page has its own title
        if block.startswith("## "):
            blocks.append(f"<h2>{_inline(block[3:])}</h2>")
        elif block.startswith("| "):
            blocks.append(_table(block.split("\n")))
        elif block.startswith("- "):
            items = "".join(f"<li>{_inline(line[2:])}</li>" for line in block.split("\n"))
            blocks.append(f"<ul>{items}</ul>")
        else:
            blocks.append(f"<p>{_inline(block)}</p>")
    return "".join(blocks)


def _table(lines: Sequence[str]) -> str:
    cells: list[list[str]] = [line.strip("|").split("|") for line in lines if "---" not in line]
    rows: list[Any] = []
    for number, row in enumerate(cells):
        tag = "th" if number == 0 else "td"
        rows.append("".join(f"<{tag}>{_inline(cell.strip())}</{tag}>" for cell in row))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    prose = any(len(cell) > LONG for row in cells for cell in row)
    style = ' style="white-space: normal"' if prose else ""
    if prose:
        body = body.replace("<td>", '<td style="white-space: normal; text-align: left">')
    return f'<div class="wide"><table{style}>{body}</table></div>'


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False).replace("\\*", "*")
    parts = escaped.split("**")
    return "".join(f"<b>{part}</b>" if i % 2 else part for i, part in enumerate(parts))

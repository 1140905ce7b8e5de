"""report.html: a self-contained page with the curves of a run or a comparison."""

import html
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from latecomer.study.compare import SHOWN, cell_text, spread
from latecomer.study.files import write_atomically
from latecomer.study.results import Comparison, Result, load
from latecomer.study.terminal import repairs, span

# Okabe and Ito's palette: distinguishable for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .2rem .6rem; border-bottom: 1px solid #ddd;
  white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f5f5f5; padding: 1rem; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(folder: Path) -> Path:
    """(Re)write the report of a run or a comparison from its files."""
    found = load(folder)
    page = _run_page(found) if isinstance(found, Result) else _comparison_page(found)
    path = folder / "report.html"
    write_atomically(path, page)
    return path


def _run_page(run: Result) -> str:
    metrics = run.metrics
    columns = {
        "accuracy": "accuracy",
        "balanced accuracy": "balanced_accuracy",
        "macro-F1": "macro_f1",
        "affected classes": "accuracy_affected",
    }
    shown = {name: column for name, column in columns.items() if metrics[column].notna().any()}
    figures = [
        _curves([(name, metrics[axis[0]], metrics[c]) for name, c in shown.items()], axis)
        for axis in (TIME, UPDATES)
    ]
    figures.append(_staleness([(run.folder.name, run.staleness)]))
    title, facts = "Latecomer run", ""
    if (run.folder / "summary.json").is_file():
        s = run.summary
        title = f"{s['strategy']} on {s['source']}"
        facts = _facts(
            {
                "accuracy": f"{s['accuracy']:.3f}",
                "balanced accuracy": f"{s['balanced_accuracy']:.3f}",
                "macro-F1": f"{s['macro_f1']:.3f}",
                "client updates": f"{s['updates']:,}",
                "virtual time": span(s["virtual_seconds"]),
                "staleness, mean": f"{s['staleness']['mean']:.1f}",
                **({"repaired late updates": repairs(s)} if s["compensation"] else {}),
            }
        )
    config = f"<h2>Config</h2><pre>{html.escape(run.config)}</pre>"
    return PAGE.format(title=html.escape(title), body=facts + embed(figures) + config)


def _comparison_page(comparison: Comparison) -> str:
    runs = comparison.runs
    by_strategy: dict[str, list[Result]] = {}
    for (strategy, _), run in runs.items():
        by_strategy.setdefault(strategy, []).append(run)
    metrics = {name: [r.metrics for r in some] for name, some in by_strategy.items()}
    figures = [_bands(metrics, axis, "accuracy") for axis in (TIME, UPDATES)]
    if all(run["accuracy_affected"].notna().any() for some in metrics.values() for run in some):
        figures.insert(1, _bands(metrics, TIME, "accuracy_affected"))
    figures.append(_staleness([(name, some[0].staleness) for name, some in by_strategy.items()]))
    body = f'<div class="wide">{_table(comparison.table)}</div>' + embed(figures)
    return PAGE.format(title="Latecomer comparison", body=body)


TIME = ("virtual_seconds", "virtual time (s)")
UPDATES = ("updates", "client updates")


def _curves(lines: Iterable[tuple[str, Any, Any]], axis: tuple[str, str]) -> go.Figure:
    figure = new_figure(f"Accuracy over {axis[1]}", axis[1], "share")
    for (name, x, y), colour in zip(lines, cycle(COLOURS), strict=False):
        figure.add_scatter(x=list(x), y=list(y), name=name, line={"color": colour})
    return figure


def _bands(groups: dict[str, list[pd.DataFrame]], axis: tuple[str, str], column: str) -> go.Figure:
    """Mean over seeds as a line, their range as a band."""
    what = "Accuracy" if column == "accuracy" else "Accuracy on the affected classes"
    figure = new_figure(f"{what} over {axis[1]}<br>line: mean, band: range", axis[1], "accuracy")
    for (name, runs), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        end = min(run[axis[0]].iloc[-1] for run in runs)
        grid = pd.Index(sorted({x for run in runs for x in run[axis[0]] if x <= end}))
        aligned = pd.DataFrame(
            {
                k: run.groupby(axis[0])[column].last().reindex(grid, method="ffill")
                for k, run in enumerate(runs)
            }
        )
        low, high, mean = aligned.min(axis=1), aligned.max(axis=1), aligned.mean(axis=1)
        figure.add_scatter(
            x=[*grid, *reversed(grid)],
            y=[*high, *reversed(list(low))],
            fill="toself",
            fillcolor=colour,
            opacity=0.2,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
        figure.add_scatter(
            x=list(grid), y=list(mean), name=name, line={"color": colour}, legendgroup=name
        )
    return figure


def _staleness(groups: Iterable[tuple[str, dict[int, int]]]) -> go.Figure:
    figure = new_figure("Staleness of arriving updates", "staleness (commits)", "updates")
    for (name, counts), colour in zip(groups, cycle(COLOURS), strict=False):
        x, y = list(counts), list(counts.values())
        figure.add_bar(x=x, y=y, name=name, marker_color=colour, opacity=0.7)
    figure.update_layout(barmode="overlay")
    return figure


def new_figure(title: str, x: str, y: str) -> go.Figure:
    """An empty chart in the style of all others."""
    figure = go.Figure()
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        height=420,
        margin={"l": 60, "r": 20, "t": 60, "b": 50},
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def embed(figures: Iterable[go.Figure]) -> str:
    """The charts, with the chart library inside the page once."""
    return "".join(
        figure.to_html(full_html=False, include_plotlyjs=i == 0, config={"displayModeBar": "hover"})
        for i, figure in enumerate(figures)
    )


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    return f'<div class="wide"><table>{rows}</table></div>'


def _table(table: pd.DataFrame) -> str:
    stats = spread(table)
    columns = [c for c in SHOWN if f"{c}_mean" in stats]
    head = "".join(f"<th>{SHOWN[c]}</th>" for c in columns)
    rows = ""
    for strategy, row in stats.iterrows():
        values = "".join(
            f"<td>{cell_text(row[f'{c}_mean'], row[f'{c}_std'])}</td>" for c in columns
        )
        rows += f"<tr><td>{html.escape(str(strategy))}</td>{values}</tr>"
    return f"<table><tr><th>strategy</th>{head}</tr>{rows}</table>"

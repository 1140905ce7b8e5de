"""Draws every view of a document with matplotlib, one image file per view."""

import re
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any, Literal

import numpy as np

from latecomer.errors import BadInput
from latecomer.study.view.panels import COLOURS, Document, Lanes, Panel, Series, View

Format = Literal["png", "svg", "pdf"]
DASHES = ("-", "--", ":", "-.", (0, (8, 3)))
MARKERS = "os^Dvx*p"
MAX_LANES = 30
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "latecomer",  # the same data give the same file
}


def write_figures(document: Document, folder: Path, kind: Format) -> list[Path]:
    """Writes `PANEL-VIEW.kind` into `folder` for every view; returns the paths."""
    if find_spec("matplotlib") is None:
        raise BadInput(
            f"--format {kind} needs matplotlib, which is not installed:"
            ' pip install "latecomer[figures]"'
        )
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return [
            _write(panel, view, folder / f"{_file_name(panel, view)}.{kind}")
            for panel in document.panels
            for view in panel.views
        ]


def _write(panel: Panel, view: View, path: Path) -> Path:
    from matplotlib.figure import Figure

    lanes = min(MAX_LANES, len(view.lanes.labels)) if view.lanes else 0
    figure = Figure(figsize=(6.4, 1.2 + 0.17 * lanes if lanes else 3.2), layout="constrained")
    axes = figure.add_subplot()
    if view.lanes is not None:
        _draw_lanes(axes, view.lanes)
    else:
        _draw_series(axes, view)
    _draw_marks(axes, view)
    axes.set_title(f"{panel.title}: {view.name}", fontsize=10, loc="left", parse_math=False)
    axes.set_xlabel(view.x_title)
    axes.set_ylabel(view.y_title)
    _legend(figure, axes)
    meta = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=150, metadata=meta)
    return path


def _draw_series(axes: Any, view: View) -> None:
    bars = [s for s in view.series if s.kind == "bar"]
    if bars:
        _draw_bars(axes, bars, view)
    areas = [s for s in view.series if s.kind == "area"]
    if areas:
        step = None if view.unit_share else "post"
        low = np.zeros(len(areas[0].x))
        for series, colour in _coloured(view, "area"):
            high = low + _numbers(series.y)
            name = _text(series.name)
            axes.fill_between(series.x, low, high, color=colour, label=name, step=step, lw=0)
            low = high
    for index, (series, colour) in enumerate(_coloured(view, "line", "step", "dots")):
        _draw_line(axes, series, colour, index)
    if view.unit_share:
        axes.set_ylim(0 if view.stacked else -0.02, 1.02)
    elif not any(s.low and min(_numbers(s.low)) < 0 for s in view.series):
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if _has_negative(view) else 0.0)
    if view.log_x:
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(left=0)


def _draw_line(axes: Any, series: Series, colour: str, index: int) -> None:
    x, y = series.x, _numbers(series.y)
    name = _text(series.name)
    if series.kind == "dots":
        marker = MARKERS[index % len(MARKERS)]
        axes.scatter(x, y, s=9, color=colour, marker=marker, label=name, linewidths=0.6)
        return
    style = {"color": colour, "linestyle": DASHES[series.dash % len(DASHES)], "linewidth": 1.6}
    axes.plot(
        x, y, label=name, drawstyle="steps-post" if series.kind == "step" else "default", **style
    )
    if series.low is not None and series.high is not None:
        low, high = _numbers(series.low), _numbers(series.high)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)


def _draw_bars(axes: Any, bars: list[Series], view: View) -> None:
    names = list(dict.fromkeys(x for s in bars for x in s.x))
    place = {name: k for k, name in enumerate(names)}
    categorical = any(isinstance(name, str) for name in names)
    disjoint = len(names) == sum(len(s.x) for s in bars)  # no two bars in one place
    stacked = view.stacked or disjoint
    width = (1.0 if categorical else _gap(names)) * 0.8 / (1 if stacked else len(bars))
    base = dict.fromkeys(names, 0.0)
    for index, (series, colour) in enumerate(_coloured(view, "bar")):
        shift = 0.0 if stacked else (index - (len(bars) - 1) / 2) * width
        x = [(place[v] if categorical else float(v)) + shift for v in series.x]
        y = np.nan_to_num(_numbers(series.y))
        bottom = [base[v] for v in series.x] if stacked else 0.0
        axes.bar(x, y, width, bottom=bottom, color=colour, label=_text(series.name))
        if series.low is not None and series.high is not None:
            spread = [
                np.nan_to_num(y - _numbers(series.low)),
                np.nan_to_num(_numbers(series.high) - y),
            ]
            axes.errorbar(x, y, np.maximum(spread, 0), fmt="none", ecolor="#444444", lw=0.8)
        for v, height in zip(series.x, y.tolist(), strict=True):
            base[v] += height
    if categorical:
        crowded = sum(len(str(n)) for n in names) > 60
        axes.set_xticks(
            range(len(names)),
            [_text(str(n)) for n in names],
            rotation=35 if crowded else 0,
            ha="right" if crowded else "center",
        )


def _draw_lanes(axes: Any, lanes: Lanes) -> None:
    shown = min(MAX_LANES, len(lanes.labels))
    limit = _first_end(lanes, shown)
    for k, state in enumerate(lanes.states):
        for lane in range(shown):
            part = slice(lanes.offsets[lane], lanes.offsets[lane + 1])
            chosen = (lanes.state[part] == k) & (lanes.start[part] < limit)
            start, end = lanes.start[part][chosen], lanes.end[part][chosen]
            if len(start):
                spans = np.stack([start, end - start], axis=1)
                height = (lane - 0.46, 0.14) if state.thin else (lane - 0.28, 0.62)
                axes.broken_barh(spans, height, color=state.colour, lw=0)
        axes.bar([0], [0], color=state.colour, label=_text(state.name))
    late = [" late" if flag else "" for flag in lanes.late]
    axes.set_yticks(
        range(shown), [f"{n}{w}" for n, w in zip(lanes.labels, late, strict=True)][:shown]
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(shown - 0.4, -0.8)
    axes.set_xlim(0, limit)


def _first_end(lanes: Lanes, shown: int) -> float:
    """End of the time axis: cut so that a lane shows about 90 spans."""
    spans = int(lanes.offsets[shown])
    horizon = float(lanes.end[:spans].max()) if spans else 1.0
    per_lane = spans / max(1, shown)
    return horizon * min(1.0, 90 / max(per_lane, 1e-9))


def _draw_marks(axes: Any, view: View) -> None:
    """Dotted lines with labels; more than eight upright ones have none."""
    upright = [m for m in view.marks if not m.level]
    for mark in view.marks:
        draw = axes.axhline if mark.level else axes.axvline
        draw(mark.at, color="#555555", linewidth=0.9, linestyle=":")
        if mark.level:
            place, coordinates = (1.0, mark.at), ("axes fraction", "data")
            style = {"ha": "right", "va": "bottom", "fontsize": 8}
        elif len(upright) <= 8:
            place = (mark.at, 0.99 - 0.07 * (upright.index(mark) % 3))
            coordinates = ("data", "axes fraction")
            style = {"ha": "left", "va": "top", "fontsize": 7}
        else:
            continue
        axes.annotate(_text(mark.label), place, xycoords=coordinates, **style)


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        widest = max(len(label) for label in labels)
        figure.legend(
            handles, labels, loc="outside lower left", ncols=max(1, 84 // (widest + 7)), fontsize=8
        )


def _coloured(view: View, *kinds: str) -> list[tuple[Series, str]]:
    """Each series of these kinds with its colour."""
    return [(s, COLOURS[s.colour]) for s in view.series if s.kind in kinds]


def _numbers(values: Any) -> Any:
    return np.array([nan if v is None else float(v) for v in values])


def _has_negative(view: View) -> bool:
    return any(bool(np.nanmin(_numbers(s.y), initial=0.0) < 0) for s in view.series)


def _gap(places: list[Any]) -> float:
    """The smallest distance between two positions; 1 for a single one."""
    return (
        float(np.min(np.diff(np.sort(np.array(places, dtype=float))))) if len(places) > 1 else 1.0
    )


def _text(name: str) -> str:
    """Escapes what matplotlib interprets: `$` (math) and a leading `_` (hidden in legends)."""
    return ("\u200b" + name if name.startswith("_") else name).replace("$", r"\$")


def _file_name(panel: Panel, view: View) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", f"{panel.id} {view.name}".lower()).strip("-.")

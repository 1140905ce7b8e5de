"""Charts and tables as plain data, drawn by the page (Plotly) or by figures.py (matplotlib).

A document has panels, a panel has one or more views (over time, over updates), a view has series.
The page makes its data tables and text alternatives from the same series.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["line", "step", "bar", "dots", "area"]
MAX_POINTS = 800  # of a curve; more cannot be distinguished on a screen

# Okabe and Ito's palette for colour-blind readers, without yellow, which is hard to see on white.
# From the ninth series on, lines are dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000", "#56B4E9", "#7A7A7A")
ORANGE = 1  # index in COLOURS for late devices, late classes and spent budgets


@dataclass(frozen=True)
class Series:
    """One line, set of bars, dots or area; `low` and `high` are the ends of its error bars."""

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    kind: Kind = "line"
    low: Sequence[Any] | None = None
    high: Sequence[Any] | None = None
    colour: int | None = None  # index in COLOURS; None: the index of the series
    dash: int | None = None
    size: int = 6  # of dots


@dataclass(frozen=True)
class Mark:
    """A labelled line at x = `at`, or at y = `at` if `level`."""

    at: float
    label: str
    level: bool = False


@dataclass(frozen=True)
class State:
    """A state of a device in a lane; a `thin` one is drawn above the others, which it overlaps."""

    name: str
    colour: str
    thin: bool = False


@dataclass(frozen=True)
class Lanes:
    """Spans of states, one lane per device; lane k has the spans `offsets[k]:offsets[k + 1]`."""

    labels: Sequence[str]
    late: Sequence[bool]
    states: Sequence[State]
    offsets: NDArray[np.uint32]
    state: NDArray[np.uint8]
    start: NDArray[np.float32]
    end: NDArray[np.float32]

    def to_json(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "late": [int(late) for late in self.late],
            "states": [
                {"name": s.name, "colour": s.colour, "thin": int(s.thin)} for s in self.states
            ],
            "offsets": _packed(self.offsets.astype("<u4")),
            "state": _packed(self.state.astype("u1")),
            "start": _packed(self.start.astype("<f4")),
            "end": _packed(self.end.astype("<f4")),
        }


@dataclass(frozen=True)
class View:
    """One chart: series or lanes, with axis titles."""

    name: str
    x_title: str
    y_title: str
    series: Sequence[Series] = ()
    marks: Sequence[Mark] = ()
    unit_share: bool = False  # y runs from 0 to 1
    stacked: bool = False
    log_x: bool = False  # with 0 drawn left of 1
    lanes: Lanes | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "x": self.x_title,
            "y": self.y_title,
            "series": [_series(i, s) for i, s in enumerate(self.series)],
        }
        for key in ("unit_share", "stacked", "log_x"):
            if getattr(self, key):
                found[key] = 1
        if self.marks:
            found["marks"] = [
                {"at": short(m.at), "label": m.label, "level": int(m.level)} for m in self.marks
            ]
        if self.lanes is not None:
            found["lanes"] = self.lanes.to_json()
        if self.note:
            found["note"] = self.note
        return found


@dataclass(frozen=True)
class Panel:
    """A titled chart with one or more views; `about` explains how to read it."""

    id: str
    title: str
    about: str
    views: Sequence[View]

    def to_json(self) -> dict[str, Any]:
        views = [view.to_json() for view in self.views]
        return {"id": self.id, "title": self.title, "about": self.about, "views": views}


@dataclass(frozen=True)
class Rows:
    """A table with paging, sorting and search: column name -> values."""

    id: str
    title: str
    about: str
    columns: Mapping[str, Sequence[Any]]

    def to_json(self) -> dict[str, Any]:
        columns = [[name, [short(v) for v in values]] for name, values in self.columns.items()]
        return {"id": self.id, "title": self.title, "about": self.about, "columns": columns}


@dataclass(frozen=True)
class Document:
    """Everything on the page of a run or a comparison; `facts` are its headline numbers."""

    title: str
    subtitle: str
    facts: Mapping[str, str]
    panels: Sequence[Panel]
    tables: Sequence[Rows] = ()
    texts: Mapping[str, str] = field(default_factory=dict)  # config, command to reproduce
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "subtitle": self.subtitle,
            "facts": [[name, value] for name, value in self.facts.items()],
            "panels": [panel.to_json() for panel in self.panels],
            "tables": [table.to_json() for table in self.tables],
            "texts": [[name, text] for name, text in self.texts.items()],
            "notes": list(self.notes),
        }


def short(value: Any) -> Any:
    """A number rounded to 5 significant digits; None for nan and infinity."""
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if not isfinite(number):
        return None
    short = float(f"{number:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def thinned(*columns: Sequence[Any]) -> list[list[Any]]:
    """At most MAX_POINTS rows, evenly picked, including the first and the last."""
    length = len(columns[0])
    if length <= MAX_POINTS:
        return [list(column) for column in columns]
    picked = np.unique(np.linspace(0, length - 1, MAX_POINTS).round().astype(int))
    return [[column[i] for i in picked] for column in columns]


def curve(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    low: Sequence[Any] | None = None,
    high: Sequence[Any] | None = None,
    dash: int | None = None,
) -> Series:
    """A line of at most MAX_POINTS points."""
    if low is None or high is None:
        x, y = thinned(x, y)
        return Series(name, x, y, dash=dash)
    x, y, low, high = thinned(x, y, low, high)
    return Series(name, x, y, low=low, high=high, dash=dash)


def without_empty(panels: Iterable[Panel | None]) -> list[Panel]:
    """The panels that have a view."""
    return [p for p in panels if p is not None and p.views]


def _series(index: int, series: Series) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": series.name,
        "kind": series.kind,
        "x": [short(v) for v in series.x],
        "y": [short(v) for v in series.y],
        "colour": (index if series.colour is None else series.colour) % len(COLOURS),
        "dash": (index // len(COLOURS) if series.dash is None else series.dash),
    }
    if series.low is not None and series.high is not None:
        found["low"] = [short(v) for v in series.low]
        found["high"] = [short(v) for v in series.high]
    if series.kind == "dots":
        found["size"] = series.size
    return found


def _packed(values: NDArray[Any]) -> str:
    return b64encode(values.tobytes()).decode("ascii")

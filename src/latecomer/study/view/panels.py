"""Charts and tables as plain data, drawn by the page (Plotly) or by figures.py (matplotlib).

A document has panels, a panel has one or more views (over time, over updates), a view has series.
The page makes its data tables and text alternatives from the same series.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy as np
import pandas as pd
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
    colour: int = -1  # index in COLOURS; -1: by the index of the series in its view
    dash: int = -1  # 0: solid; -1: solid for the first eight series of a view
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

    def __post_init__(self) -> None:
        numbered = [
            replace(
                series,
                colour=(index if series.colour < 0 else series.colour) % len(COLOURS),
                dash=index // len(COLOURS) if series.dash < 0 else series.dash,
            )
            for index, series in enumerate(self.series)
        ]
        object.__setattr__(self, "series", numbered)


@dataclass(frozen=True)
class Panel:
    """A titled chart with one or more views; `about` explains how to read it."""

    id: str
    title: str
    about: str
    views: Sequence[View]


@dataclass(frozen=True)
class Rows:
    """A table with paging, sorting and search: column name -> values."""

    id: str
    title: str
    about: str
    columns: Mapping[str, Sequence[Any]]


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


def to_json(value: Any) -> Any:
    """A document or a part of it for the page.

    Dataclasses become objects, mappings lists of pairs, arrays base64 of little-endian values.
    """
    if isinstance(value, Mapping):
        return [[to_json(name), to_json(each)] for name, each in value.items()]
    if isinstance(value, np.ndarray):
        return b64encode(value.astype(value.dtype.newbyteorder("<")).tobytes()).decode("ascii")
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return short(value)


def short(value: Any) -> Any:
    """A number rounded to 5 significant digits; None for nan and infinity."""
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if not isfinite(number):
        return None
    short = float(f"{number:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def thinned(*columns: Sequence[Any], limit: int = MAX_POINTS) -> list[list[Any]]:
    """At most `limit` rows, evenly picked, including the first and the last."""
    length = len(columns[0])
    if length <= limit:
        return [list(column) for column in columns]
    picked = np.unique(np.linspace(0, length - 1, limit).round().astype(int)).tolist()
    return [[column[i] for i in picked] for column in columns]


def bars(name: str, values: Mapping[str, Sequence[float]], scale: float = 1.0) -> Series:
    """A bar for each entry: the mean of its values over `scale`; whisker: lowest to highest."""
    table = pd.DataFrame({label: pd.Series(list(v), dtype=float) for label, v in values.items()})
    mean, low, high = (list(found / scale) for found in (table.mean(), table.min(), table.max()))
    return Series(name, list(values), mean, "bar", low=low, high=high)


def curve(
    name: str,
    x: Sequence[Any],
    y: Sequence[Any],
    low: Sequence[Any] | None = None,
    high: Sequence[Any] | None = None,
    dash: int = -1,
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


UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


@dataclass(frozen=True)
class Clock:
    """Converts seconds of virtual time to the unit that all charts of a page share."""

    unit: str
    seconds: float

    @property
    def title(self) -> str:
        return f"virtual time ({self.unit})"

    def __call__(self, seconds: float) -> float:
        return seconds / self.seconds

    def each(self, seconds: Iterable[float]) -> list[float]:
        return [value / self.seconds for value in seconds]


def clock_for(horizon: float) -> Clock:
    """The largest unit of which `horizon` (seconds) is at least three."""
    for unit, size in UNITS:
        if horizon >= 3 * size:
            return Clock(unit, size)
    return Clock("seconds", 1.0)

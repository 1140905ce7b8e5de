"""Device activity over time: one lane per device, and the share of the fleet in each state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from latecomer.fleet.availability import close_after, next_open
from latecomer.study.view.history import End, History
from latecomer.study.view.panels import Clock, Lanes, Panel, Series, State, View, thinned

DOWNLOAD, TRAINING, UPLOAD, LATE, LOST, OFFLINE, WORKING, OPEN = range(8)
STATES = (
    State("download", "#56B4E9"),
    State("training", "#0072B2"),
    State("upload", "#009E73"),
    State("late upload in flight", "#D55E00", thin=True),
    State("lost", "#CC79A7"),
    State("offline", "#7A7A7A"),
    State("working", "#0072B2"),  # the log has no phases of the task
    State("no reply yet", "#E69F00"),
)
# State -> its index in COLOURS, in stacking order.
STATE_COLOURS = {
    TRAINING: 0,
    WORKING: 0,
    OPEN: 4,
    DOWNLOAD: 6,
    UPLOAD: 2,
    LATE: 1,
    LOST: 3,
    OFFLINE: 7,
}
MAX_SPANS = 100_000  # about a megabyte of the page
SAMPLES = 160
Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Fleet:
    """The contents of fleet.json: late devices, availability windows, declared widths."""

    devices: int
    late: frozenset[int]
    windows: Mapping[int, tuple[float, Windows]]  # device -> period, windows
    widths: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Spans:
    """Time spans in which a device was in a state; times in virtual seconds."""

    device: NDArray[np.int64]
    state: NDArray[np.uint8]
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    def where(self, mask: NDArray[np.bool_]) -> "Spans":
        return Spans(self.device[mask], self.state[mask], self.start[mask], self.end[mask])


def timeline(
    history: History, fleet: Fleet, clock: Clock, max_spans: int = MAX_SPANS
) -> Panel | None:
    """Device activity over virtual time; None before the first task has ended."""
    horizon = history.now
    if horizon <= 0 or not len(history.tasks):
        return None
    spans = spans_of(history, fleet)
    devices = devices_in(history, fleet)
    shares, late = _shares(spans, devices, horizon, clock)
    shown = _chosen(spans, devices, fleet, max_spans)
    lanes = lanes_of(spans, shown, fleet.late, STATES, clock)
    notes = ["Late devices are listed first."] if fleet.late else []
    if len(shown) < len(devices):
        notes.append(f"{len(shown):,} of {len(devices):,} devices are shown; shares count all.")
    views = [
        View("by device", clock.title, "device", lanes=lanes, note=" ".join(notes)),
        View("share of the fleet", clock.title, "share", shares, unit_share=True, stacked=True),
    ]
    if late is not None:
        views.append(View("late uploads in flight", clock.title, "uploads", [late]))
    return Panel(
        "timeline",
        "Device activity",
        "Blank: idle. Work pauses while a device is offline.",
        views,
    )


def devices_in(history: History, fleet: Fleet) -> list[int]:
    """The devices that have received a task or have times offline."""
    return sorted(history.devices | set(fleet.windows))


def spans_of(history: History, fleet: Fleet) -> Spans:
    """Spans of all devices; open tasks last until the last event."""
    tasks = history.tasks
    device = np.array(tasks.device, dtype=np.int64)
    sent, ended = np.array(tasks.sent), np.array(tasks.ended)
    end = np.array(tasks.end)
    parts: list[Spans] = []

    def add(
        devices: NDArray[np.int64],
        state: int,
        start: NDArray[np.float64],
        stop: NDArray[np.float64],
    ) -> None:
        positive = stop > start
        states = np.full(int(positive.sum()), state, dtype=np.uint8)
        parts.append(Spans(devices[positive], states, start[positive], stop[positive]))

    known = np.isfinite(np.array(tasks.spans[0])) & (end != End.LOST)
    begin = sent[known]
    for state, seconds in zip((DOWNLOAD, TRAINING, UPLOAD), tasks.spans, strict=True):
        stop = begin + np.array(seconds)[known]
        add(device[known], state, begin, np.minimum(stop, ended[known]))
        begin = stop
    # A difference within the log's rounding is not lateness.
    late = ended[known] - begin > 1e-4 * np.maximum(1.0, ended[known] - sent[known])
    add(device[known][late], LATE, begin[late], ended[known][late])
    lost = end == End.LOST
    add(device[lost], LOST, sent[lost], ended[lost])
    plain = ~known & ~lost
    add(device[plain], WORKING, sent[plain], ended[plain])
    if history.open:
        open_devices, since = zip(*history.open.values(), strict=True)
        busy = np.array(open_devices, dtype=np.int64)
        add(busy, OPEN, np.array(since, dtype=float), np.full(len(busy), history.now))
    parts.append(_offline(devices_in(history, fleet), fleet, history.now))
    return Spans(
        np.concatenate([p.device for p in parts]),
        np.concatenate([p.state for p in parts]),
        np.concatenate([p.start for p in parts]),
        np.concatenate([p.end for p in parts]),
    )


def _offline(devices: Sequence[int], fleet: Fleet, horizon: float) -> Spans:
    offline: list[int] = []
    start: list[float] = []
    end: list[float] = []
    for device in devices:
        if device not in fleet.windows:
            continue
        period, windows = fleet.windows[device]
        at = 0.0
        while at < horizon and len(offline) < 10 * MAX_SPANS:
            opens = next_open(windows, period, at)
            if opens > at:
                offline.append(device)
                start.append(at)
                end.append(min(opens, horizon))
            at = close_after(windows, period, opens)
            if not isfinite(at):
                break
    state = np.full(len(offline), OFFLINE, dtype=np.uint8)
    return Spans(np.array(offline, dtype=np.int64), state, np.array(start), np.array(end))


def state_shares(spans: Spans, devices: Sequence[int], horizon: float) -> NDArray[np.float64]:
    """(samples, states) share of the devices in each state, at SAMPLES evenly spaced times.

    A device counts in one state; if several overlap, in this order: offline, working, lost, late
    upload in flight.
    """
    rank = {device: k for k, device in enumerate(devices)}
    row = np.array([rank[d] for d in spans.device.tolist()], dtype=np.int64)
    times = (np.arange(SAMPLES) + 0.5) * horizon / SAMPLES
    first, stop = np.searchsorted(times, spans.start), np.searchsorted(times, spans.end)
    grid = np.full((len(devices), SAMPLES), len(STATES), dtype=np.uint8)
    for state in (LATE, LOST, OPEN, WORKING, DOWNLOAD, TRAINING, UPLOAD, OFFLINE):
        chosen = np.flatnonzero((spans.state == state) & (stop > first))
        single = chosen[stop[chosen] - first[chosen] == 1]
        grid[row[single], first[single]] = state
        for k in chosen[stop[chosen] - first[chosen] > 1].tolist():
            grid[row[k], first[k] : stop[k]] = state
    counts = [(grid == state).sum(axis=0) for state in range(len(STATES))]
    return np.stack(counts, axis=1) / max(1, len(devices))


def _shares(
    spans: Spans, devices: Sequence[int], horizon: float, clock: Clock
) -> tuple[list[Series], Series | None]:
    found = state_shares(spans, devices, horizon)
    x = clock.each(((np.arange(SAMPLES) + 0.5) * horizon / SAMPLES).tolist())
    shares = [
        Series(STATES[s].name, x, found[:, s].tolist(), "area", colour=colour)
        for s, colour in STATE_COLOURS.items()
        if found[:, s].any()
    ]
    late = spans.where(spans.state == LATE)
    if not len(late.start):
        return shares, None
    times = (np.arange(SAMPLES) + 0.5) * horizon / SAMPLES
    in_flight = np.searchsorted(np.sort(late.start), times) - np.searchsorted(
        np.sort(late.end), times
    )
    return shares, Series("late uploads", x, in_flight.tolist(), "step", colour=1)


def lanes_of(
    spans: Spans,
    shown: list[int],
    late: frozenset[int],
    states: Sequence[State],
    clock: Clock,
) -> Lanes:
    """The lanes of the devices `shown`, with those of the `states` that occur."""
    place = {device: k for k, device in enumerate(shown)}
    kept = spans.where(np.isin(spans.device, shown))
    lane = np.array([place[d] for d in kept.device.tolist()], dtype=np.int64)
    order = np.lexsort((kept.start, lane))
    offsets = np.searchsorted(lane[order], np.arange(len(shown) + 1))
    used = sorted(set(kept.state.tolist()))
    renumbered = np.zeros(len(states), dtype=np.uint8)
    renumbered[used] = np.arange(len(used))
    return Lanes(
        labels=[str(d) for d in shown],
        late=[d in late for d in shown],
        states=[states[s] for s in used],
        offsets=offsets.astype(np.uint32),
        state=renumbered[kept.state[order]],
        start=(kept.start[order] / clock.seconds).astype(np.float32),
        end=(kept.end[order] / clock.seconds).astype(np.float32),
    )


def _chosen(spans: Spans, devices: Sequence[int], fleet: Fleet, max_spans: int) -> list[int]:
    """Late devices, then the others; an even sample of them if there are over `max_spans` spans."""
    late = [d for d in devices if d in fleet.late]
    others = [d for d in devices if d not in fleet.late]
    ids, counts = np.unique(spans.device, return_counts=True)
    size = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    kept: list[int] = []
    total = 0
    for device in late:
        total += size.get(device, 0)
        if total > max_spans and kept:
            return kept
        kept.append(device)
    needed = sum(size.get(d, 0) for d in others)
    if total + needed > max_spans:
        count = max(1, int(len(others) * (max_spans - total) / max(1, needed)))
        (others,) = thinned(others, limit=count)
    return [*kept, *others]

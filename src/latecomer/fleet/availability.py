"""Periodic availability windows: next opening, next closing, and the end of work paused outside.

Windows are [start, end) seconds within each period. They may abut, overlap, or extend past the end
of the period into the next one; no windows means always reachable. Run time is linear in the
number of windows and independent of the number of periods passed. Boundaries are compared as
absolute times, so at the time that `close_after` returns the window is closed.
"""

from functools import lru_cache
from math import ceil, inf

from latecomer.fleet.profile import Windows


def next_open(windows: Windows, period: float, t: float) -> float:
    """The earliest time >= t at which the device is reachable."""
    if not windows:
        return t
    spans = _spans(windows, period)
    if not spans:
        return t
    cycle = _completed_periods(t, period)
    for opens, closes in spans:
        if t < _at(cycle, closes, period):
            return max(t, _at(cycle, opens, period))
    return _at(cycle + 1, spans[0][0], period)


def close_after(windows: Windows, period: float, t: float) -> float:
    """The end of the window open at t, else of the next one; inf if always reachable."""
    spans = _spans(windows, period)
    if not spans:
        return inf
    cycle = _completed_periods(t, period)
    wraps = spans[-1][1] == period and spans[0][0] == 0  # one window crosses the period boundary
    for _, closes in spans[:-1] if wraps else spans:
        if t < _at(cycle, closes, period):
            return _at(cycle, closes, period)
    return _at(cycle + 1, spans[0][1], period)


def finish(windows: Windows, period: float, start: float, seconds: float) -> float:
    """The time at which `seconds` of work begun at `start` end, if work pauses outside windows.

    Zero seconds end at `start`, even while the device is unreachable.
    """
    if not windows:
        return start + seconds
    spans = _spans(windows, period)
    if not spans or seconds <= 0:
        return start + seconds
    cycle = _completed_periods(start, period)
    left = seconds
    for opens, closes in spans:
        begin = max(start, _at(cycle, opens, period))
        available = max(0.0, _at(cycle, closes, period) - begin)
        if left <= available:
            return max(start + seconds, begin + left)
        left -= available
    per_period = sum(closes - opens for opens, closes in spans)
    whole = ceil(left / per_period) - 1
    left = max(0.0, left - whole * per_period)
    cycle += 1 + whole
    for opens, closes in spans:
        if left <= closes - opens:
            return max(start + seconds, _at(cycle, opens, period) + left)
        left -= closes - opens
    # Reached by rounding only: the work ends with the last window.
    return max(start + seconds, _at(cycle, spans[-1][1], period))


def _completed_periods(t: float, period: float) -> float:
    """The number of complete periods before t."""
    cycle = t // period
    # The quotient may be rounded down although t is exactly the start of the next period.
    return cycle + 1 if (cycle + 1) * period <= t else cycle


def _at(cycle: float, phase: float, period: float) -> float:
    """The absolute time of a phase; the end of a period is bit-equal to the start of the next."""
    return (cycle + 1) * period if phase == period else cycle * period + phase


@lru_cache(maxsize=4096)
def _spans(windows: Windows, period: float) -> list[tuple[float, float]]:
    """The windows cut at the period boundary, sorted and merged; empty if always reachable."""
    pieces: list[tuple[float, float]] = []
    for start, end in windows:
        pieces.append((start, min(end, period)))
        if end > period:
            pieces.append((0.0, end - period))
    merged: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return [] if merged == [(0.0, period)] else merged

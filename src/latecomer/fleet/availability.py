"""When a device is reachable, and when work that pauses outside its windows is done.

Windows are [start, end) seconds within each period. They may abut, overlap, or run past the end
of the period into the next one; no windows means always reachable. All functions take time
proportional to the number of windows, however many periods they look across. Borders are compared
as absolute times, so a window is closed at the very moment that `close_after` names.
"""

from functools import lru_cache
from math import ceil, inf

from latecomer.fleet.profile import Windows


def next_open(windows: Windows, period: float, t: float) -> float:
    """The first moment at or after t at which the device is reachable."""
    if not windows:
        return t
    spans = _spans(windows, period)
    if not spans:
        return t
    turn = _turn(t, period)
    for opens, closes in spans:
        if t < _at(turn, closes, period):
            return max(t, _at(turn, opens, period))
    return _at(turn + 1, spans[0][0], period)


def close_after(windows: Windows, period: float, t: float) -> float:
    """When the window that is open at t, or else the next to open, closes; inf if never."""
    spans = _spans(windows, period)
    if not spans:
        return inf
    turn = _turn(t, period)
    runs_on = spans[-1][1] == period and spans[0][0] == 0  # past midnight, so to speak
    for _, closes in spans[:-1] if runs_on else spans:
        if t < _at(turn, closes, period):
            return _at(turn, closes, period)
    return _at(turn + 1, spans[0][1], period)


def finish(windows: Windows, period: float, start: float, seconds: float) -> float:
    """When `seconds` of work begun at `start` are done, if it only advances while reachable.

    A device out of reach is paused, hence late rather than lost. No work is done at once.
    """
    if not windows:
        return start + seconds
    spans = _spans(windows, period)
    if not spans or seconds <= 0:
        return start + seconds
    turn = _turn(start, period)
    left = seconds
    for opens, closes in spans:
        begin = max(start, _at(turn, opens, period))
        room = max(0.0, _at(turn, closes, period) - begin)
        if left <= room:
            return max(start + seconds, begin + left)
        left -= room
    per_period = sum(closes - opens for opens, closes in spans)
    whole = ceil(left / per_period) - 1
    left = max(0.0, left - whole * per_period)
    turn += 1 + whole
    for opens, closes in spans:
        if left <= closes - opens:
            return max(start + seconds, _at(turn, opens, period) + left)
        left -= closes - opens
    # Only rounding leads here: the work fills the last window to the brim.
    return max(start + seconds, _at(turn, spans[-1][1], period))


def _turn(t: float, period: float) -> float:
    """The number of whole periods before t."""
    turn = t // period
    # The quotient may be rounded down although t is the very start of the next period.
    return turn + 1 if (turn + 1) * period <= t else turn


def _at(turn: float, phase: float, period: float) -> float:
    """The absolute time of a phase; the end of a period is the start of the next, to the bit."""
    return (turn + 1) * period if phase == period else turn * period + phase


@lru_cache(maxsize=4096)
def _spans(windows: Windows, period: float) -> list[tuple[float, float]]:
    """The windows cut at the period's border, sorted and merged; empty if always open."""
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

"""Availability windows: hand-worked nights, and properties against a second-by-second count."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latecomer.fleet.availability import close_after, finish, next_open
from latecomer.fleet.profile import Windows

HOUR = 3600.0
DAY = 24 * HOUR
NIGHT = ((22 * HOUR, 30 * HOUR),)  # from 22:00 to 6:00
SPLIT_NIGHT = ((0.0, 6 * HOUR), (22 * HOUR, DAY))  # the same, cut at midnight
OFFICE = ((9 * HOUR, 12 * HOUR), (13 * HOUR, 17 * HOUR))


def test_without_windows_a_device_is_always_open() -> None:
    assert next_open((), DAY, 5.0) == 5.0
    assert close_after((), DAY, 5.0) == inf
    assert finish((), DAY, 5.0, 1e6) == 1e6 + 5


@pytest.mark.parametrize("windows", [((0.0, DAY),), ((0.0, 5.0), (5.0, DAY)), ((7.0, DAY + 7.0),)])
def test_windows_that_fill_the_period_are_always_open(windows: Windows) -> None:
    assert next_open(windows, DAY, 6.0) == 6.0
    assert close_after(windows, DAY, 6.0) == inf
    assert finish(windows, DAY, 6.0, 10 * DAY) == 10 * DAY + 6


@pytest.mark.parametrize("windows", [NIGHT, SPLIT_NIGHT])
def test_a_night_across_midnight(windows: Windows) -> None:
    assert next_open(windows, DAY, 12 * HOUR) == 22 * HOUR
    assert next_open(windows, DAY, 23 * HOUR) == 23 * HOUR
    assert next_open(windows, DAY, DAY) == DAY
    assert next_open(windows, DAY, 6 * HOUR) == 22 * HOUR
    assert close_after(windows, DAY, 23 * HOUR) == 30 * HOUR
    assert close_after(windows, DAY, 12 * HOUR) == 30 * HOUR
    assert close_after(windows, DAY, 1 * HOUR) == 6 * HOUR
    # 10 h of work begun at 23:00: 7 h until 6:00, then 3 h from 22:00 the next evening.
    assert finish(windows, DAY, 23 * HOUR, 10 * HOUR) == DAY + 25 * HOUR
    # 3 h across midnight are not interrupted.
    assert finish(windows, DAY, 23 * HOUR, 3 * HOUR) == 26 * HOUR
    # 8 h of work fill a night to the second.
    assert finish(windows, DAY, 12 * HOUR, 8 * HOUR) == 30 * HOUR
    # 80 h are ten nights.
    assert finish(windows, DAY, 12 * HOUR, 80 * HOUR) == 9 * DAY + 30 * HOUR


def test_two_windows_a_day() -> None:
    assert next_open(OFFICE, DAY, 12 * HOUR) == 13 * HOUR
    assert next_open(OFFICE, DAY, 18 * HOUR) == DAY + 9 * HOUR
    assert close_after(OFFICE, DAY, 10 * HOUR) == 12 * HOUR
    assert close_after(OFFICE, DAY, 18 * HOUR) == DAY + 12 * HOUR
    assert finish(OFFICE, DAY, 11 * HOUR, 2 * HOUR) == 14 * HOUR
    assert finish(OFFICE, DAY, 16 * HOUR, 5 * HOUR) == DAY + 14 * HOUR


def test_zero_work_ends_at_its_start_even_while_unreachable() -> None:
    assert finish(OFFICE, DAY, 3 * HOUR, 0) == 3 * HOUR


def test_a_billion_periods_cost_no_more_than_one() -> None:
    assert finish(((0.0, 1.0),), 10.0, 5.0, 1e9) == 1e10 + 1


calm = settings(deadline=None, derandomize=True)


@st.composite
def _schedules(draw: st.DrawFn) -> tuple[Windows, float]:
    period = draw(st.integers(1, 20))
    windows = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, period - 1))
        windows.append((float(start), float(start + draw(st.integers(1, period)))))
    return tuple(windows), float(period)


_moments = st.integers(0, 100)
_work = st.integers(0, 100)


def _is_open(windows: Windows, period: float, second: int) -> bool:
    phase = second % period
    return not windows or any(s <= phase < e or s <= phase + period < e for s, e in windows)


@calm
@given(_schedules(), _moments, _work)
def test_finish_equals_a_count_by_the_second(
    schedule: tuple[Windows, float], start: int, seconds: int
) -> None:
    clock, left = start, seconds
    while left:
        left -= _is_open(*schedule, clock)
        clock += 1
    assert finish(*schedule, start, seconds) == clock


@calm
@given(_schedules(), _moments)
def test_opening_and_closing_equal_a_count_by_the_second(
    schedule: tuple[Windows, float], start: int
) -> None:
    windows, period = schedule
    opens = start
    while not _is_open(windows, period, opens):
        opens += 1
    assert next_open(windows, period, start) == opens
    horizon = opens + 2 * int(period)
    closed = (second for second in range(opens, horizon) if not _is_open(windows, period, second))
    assert close_after(windows, period, start) == next(closed, inf)


@calm
@given(_schedules(), _moments, _work, _work)
def test_work_in_two_parts_ends_with_the_whole(
    schedule: tuple[Windows, float], start: int, first: int, second: int
) -> None:
    between = finish(*schedule, start, first)
    assert finish(*schedule, between, second) == finish(*schedule, start, first + second)


_fine = st.integers(0, 100 * 1024).map(lambda n: n / 1024)  # exact in binary, so no rounding


@calm
@given(_schedules(), _fine, _fine, _fine)
def test_finish_is_monotone(
    schedule: tuple[Windows, float], start: float, seconds: float, more: float
) -> None:
    done = finish(*schedule, start, seconds)
    assert finish(*schedule, start, seconds + more) >= done + more
    assert finish(*schedule, start + more, seconds) >= done


_floats = st.floats(0, 1e5)


@calm
@given(_schedules(), _floats, _floats)
def test_finish_is_never_early(
    schedule: tuple[Windows, float], start: float, seconds: float
) -> None:
    assert finish(*schedule, start, seconds) >= start + seconds


@calm
@given(_schedules(), _floats)
def test_the_next_opening_is_open(schedule: tuple[Windows, float], t: float) -> None:
    opens = next_open(*schedule, t)
    assert opens >= t
    assert next_open(*schedule, opens) == opens
    assert close_after(*schedule, t) > t


@calm
@given(
    st.floats(0.1, 1e5),
    st.floats(0, 0.999),
    st.floats(0.01, 0.99),
    st.integers(0, 10**6),
)
def test_openings_and_closings_alternate_for_any_rounding(
    period: float, start: float, length: float, periods: int
) -> None:
    windows = ((start * period, start * period + length * period),)
    t = periods * period
    for _ in range(20):
        opens = next_open(windows, period, t)
        closes = close_after(windows, period, opens)
        assert closes > opens
        assert finish(windows, period, opens, (closes - opens) / 2) < closes
        assert next_open(windows, period, closes) > closes
        assert closes == close_after(windows, period, t)
        t = closes

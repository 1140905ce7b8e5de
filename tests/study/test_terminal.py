"""Progress in a terminal and in a log."""

import io
from typing import Any

import pytest
from rich.console import Console

from latecomer.study import terminal
from latecomer.study.terminal import Bar, Lines, UpdateRate, progress_for, sparkline


def console(width: int = 140, is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=is_terminal), out


def row(updates: int, accuracy: float) -> dict[str, Any]:
    return {"updates": updates, "virtual_seconds": 7200.0, "accuracy": accuracy}


def test_a_sparkline_runs_from_the_lowest_to_the_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    many = sparkline([k / 1000 for k in range(1000)])
    assert len(many) <= 16
    assert many[0] == "▁"
    assert many[-1] == "█"


def test_the_update_rate_counts_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    rate = UpdateRate()
    assert rate(1000) == ""  # a resumed run has 1000 already
    assert rate(1400) == "100 updates/s"


def test_a_terminal_shows_time_rate_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, _ = console()
    bar = progress_for(screen, False)
    assert isinstance(bar, Bar)
    for k, value in enumerate((0.1, 0.5, 0.9)):
        bar.evaluated(row(k, value))
    now = iter([0.0, 2.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    bar.state(0, 0.0)
    text = bar.state(500, 7200.0)
    assert text == "500 updates, 250 updates/s, 2.0 h virtual, accuracy 0.900 ▁▅█"


def test_a_narrow_terminal_leaves_the_rate_out() -> None:
    screen, _ = console(width=80)
    bar = Bar(screen)
    bar.evaluated(row(1, 0.5))
    assert bar.state(500, 7200.0) == "500 updates, 2.0 h virtual, accuracy 0.500"
    assert len(bar.state(10**7, 7200.0)) < 60


def test_a_log_gets_plain_lines() -> None:
    screen, out = console(is_terminal=False)
    lines = progress_for(screen, False)
    assert isinstance(lines, Lines)
    lines.evaluated(row(10, 0.25))
    lines.evaluated(row(20, 0.5))  # too soon after the last one
    lines.finished()
    assert out.getvalue() == "10 updates, 2.0 h virtual, accuracy 0.250\n"

"""Progress in a terminal and in a log."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from latecomer.study import terminal
from latecomer.study.terminal import Bar, Lines, progress_for


def console(width: int = 140, is_terminal: bool = True) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=is_terminal), out


def row(updates: int, accuracy: float) -> dict[str, Any]:
    return {"updates": updates, "virtual_seconds": 7200.0, "accuracy": accuracy}


def test_a_terminal_shows_updates_time_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "headline", lambda experiment, verbose: [])
    screen, out = console()
    bar = progress_for(screen, False)
    assert isinstance(bar, Bar)
    bar.started(cast(Any, SimpleNamespace(scoring=SimpleNamespace(main="accuracy"))), Path())
    bar.evaluated(row(1, 0.9))
    bar.advanced(0.5, 500, 7200.0)
    bar.finished()
    assert "500 updates, 2.0 h virtual, accuracy 0.900" in out.getvalue()


def test_a_log_gets_plain_lines() -> None:
    screen, out = console(is_terminal=False)
    lines = progress_for(screen, False)
    assert isinstance(lines, Lines)
    lines.evaluated(row(10, 0.25))
    lines.evaluated(row(20, 0.5))  # too soon after the last one
    lines.finished()
    assert out.getvalue() == "10 updates, 2.0 h virtual, accuracy 0.250\n"

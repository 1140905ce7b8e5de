"""The warning of a learning rate that is far too small or too large."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import latecomer
from latecomer.study.config import Config, Tree, with_settings
from latecomer.study.learning_rate import RateWarning, rate_problem
from latecomer.study.runner import Silent, resume_run, start_run

MakeConfig = Callable[..., Config]
FLAT = [2.30, 2.30, 2.29, 2.29, 2.29, 2.28, 2.28]


def judged(losses: list[float], refused: float = 0.0, distance: float = 0.1, **more: Any) -> str:
    found = rate_problem(losses, refused, distance, 0.1, **more)
    return "" if found is None else f"{'small' if found.too_small else 'large'} {found.lr:g}"


@pytest.mark.parametrize(
    ("losses", "distance", "verdict"),
    [
        (FLAT, 0.1, "small 0.3"),
        (FLAT, 2.0, "large 0.033"),  # far from the initial model and nothing learned: dead units
        (FLAT[:5], 0.1, ""),  # too few evaluations
        ([2.3, 2.3, 2.2, 2.1, 2.0, 1.9], 0.1, ""),
        ([2.3, 2.4, 3.0, 40.0, 9.0, 7.0], 0.1, "large 0.033"),
        ([2.3, 2.0, 1.5, 2.2, 2.3, 2.3], 0.1, "large 0.033"),  # it learned, then forgot
        ([2.3, 1.0, float("nan"), 2.0, 2.0, 2.0], 0.1, "large 0.033"),
        ([2.3, 4.0, 3.0, 1.0, 0.9, 0.8], 0.1, ""),  # a peak from which it recovered
        ([2.3, 2.29, 2.17, 2.25, 2.24, 2.24], 0.1, ""),  # neither flat nor diverged
    ],
)
def test_a_curve_is_judged(losses: list[float], distance: float, verdict: str) -> None:
    assert judged(losses, distance=distance) == verdict


def test_refused_updates_mean_a_large_rate_even_if_the_loss_is_flat() -> None:
    assert judged(FLAT, refused=0.06) == "large 0.033"
    assert judged(FLAT, refused=0.04) == "small 0.3"


def test_a_run_that_ends_while_its_loss_falls_slowly_is_told_to_raise_its_rate() -> None:
    falling = [2.3 - 0.02 * step for step in range(30)]
    assert judged(falling, ended=True) == "small 0.3"
    assert judged(falling) == ""
    shaking = [loss + 0.3 * (step % 2) for step, loss in enumerate(falling)]
    assert judged(shaking, ended=True) == ""
    assert judged([2.3 - 0.07 * step for step in range(30)], ended=True) == ""


def test_a_warning_is_given_once_after_a_fifth_of_the_run_and_a_fleet_pass() -> None:
    for devices, expected in ((10, 20), (60, 60)):
        made = RateWarning(0.1, devices, noise=True)
        given = [n for n in range(0, 101, 2) if made.record(2.3, 0.0, n / 100, n, 0)]
        assert given == [expected]
        assert made.text is not None
        assert "training.lr = 0.1 may be too small, or the privacy noise; try 0.3" in made.text


class Heard(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warned(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "fedbuff", "latecomer"])
@pytest.mark.parametrize(("lr", "way"), [(0.0001, "small"), (30.0, "large"), (0.3, "")])
def test_a_run_warns_whatever_its_strategy(
    tiny: MakeConfig, tmp_path: Path, strategy: str, lr: float, way: str
) -> None:
    settings = ("data.partition=iid", f"strategy.name={strategy}", f"training.lr={lr}")
    heard = Heard()
    summary = start_run(tiny(*settings, "stop.updates=200"), tmp_path / "run", heard)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    logged = [event["reason"] for event in events if event["event"] == "warning"]
    assert logged == heard.texts
    assert set(logged) <= set(summary["warnings"])
    if way:
        (text,) = logged
        assert f"training.lr = {lr:g} may be too {way}" in text
    else:
        assert not logged


def test_a_resumed_run_keeps_its_warning(tiny: MakeConfig, tmp_path: Path) -> None:
    class Stop(Exception): ...

    class Stops(Silent):
        def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
            if updates >= self.at:
                raise Stop

        def __init__(self, at: int) -> None:
            self.at = at

    config = tiny("training.lr=0.0001", "stop.updates=100", "checkpoint.every=5")
    whole = start_run(config, tmp_path / "whole")
    for at in (12, 50):  # before and after the warning
        folder = tmp_path / f"cut-{at}"
        with pytest.raises(Exception, match="Stop"):
            start_run(config, folder, Stops(at))
        assert resume_run(folder)["warnings"] == whole["warnings"]
        assert (folder / "events.jsonl").read_bytes() == (
            tmp_path / "whole/events.jsonl"
        ).read_bytes()
    assert whole["warnings"]


def test_python_logs_the_warning(
    tiny_tree: Tree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "latecomer"):
        latecomer.run(with_settings(tiny_tree, ["training.lr=0.0001"]), tmp_path / "run")
    assert "training.lr = 0.0001 may be too small" in caplog.text

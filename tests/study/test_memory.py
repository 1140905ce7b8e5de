"""Whole runs of devices that remember: the same with every kernel, and after a kill."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dying import DieAfter, Killed
from latecomer.study.config import Config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import resume_run, start_run

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]

REMEMBERS = {
    "aso-fed": ["strategy.name=aso-fed", "strategy.beta=0.3"],
    "paflm": ["strategy.name=paflm", "strategy.threshold=100.0"],
}
IN_FLIGHT = ["fleet.late.classes=[5]", "fleet.late.devices=4", "fleet.late.delay={gamma = 3}"]


@pytest.mark.parametrize("kernel", ["plain", "batched", "compiled"])
@pytest.mark.parametrize("strategy", list(REMEMBERS))
def test_killed_in_mid_run(tiny: MakeConfig, tmp_path: Path, strategy: str, kernel: str) -> None:
    settings = [*REMEMBERS[strategy], *IN_FLIGHT, f"engine.kernel={kernel}", "stop.updates=80"]
    config = tiny(*settings, "checkpoint.every=7")
    whole = start_run(config, tmp_path / "whole")
    with pytest.raises(Killed):
        start_run(config, tmp_path / "cut", DieAfter(45))
    cut = resume_run(tmp_path / "cut")
    assert cut["model_hash"] == whole["model_hash"]
    assert cut["bytes"] == whole["bytes"]
    saved = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("whole", "cut")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("strategy", list(REMEMBERS))
def test_kernels_agree(start: Start, strategy: str) -> None:
    found = [
        start(*REMEMBERS[strategy], *IN_FLIGHT, f"engine.kernel={kernel}")[1]
        for kernel in ("plain", "batched", "compiled")
    ]
    assert found[0]["model_hash"] == found[1]["model_hash"]
    assert found[0]["loss"] == pytest.approx(found[2]["loss"], rel=1e-3)


@pytest.mark.parametrize("strategy", list(REMEMBERS))
def test_the_kernel_is_chosen_for_one_by_one(tiny: MakeConfig, strategy: str) -> None:
    assert Experiment(tiny(*REMEMBERS[strategy])).kernel_choice.startswith(
        "plain (devices that keep state"
    )
    without = {"aso-fed": "strategy.beta=0.0", "paflm": "strategy.threshold=0.0"}[strategy]
    chosen = Experiment(tiny(f"strategy.name={strategy}", without)).kernel_choice
    assert chosen.startswith("batched")


def test_saved_bytes_are_told_where_there_are_any(start: Start) -> None:
    folder, summary = start(*REMEMBERS["paflm"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    saved = [event["saved"] for event in events if event.get("skipped")]
    assert saved
    assert summary["bytes"]["saved"] == sum(saved)
    assert set(start(*REMEMBERS["aso-fed"])[1]["bytes"]) == {"up", "down"}

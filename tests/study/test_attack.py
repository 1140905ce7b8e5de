"""Runs with hostile devices: repeatable, resumable, and the plain run where the attack is off."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from latecomer import cli
from latecomer.errors import BadInput
from latecomer.study.config import Config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import Silent, resume_run, start_run

MakeConfig = Callable[..., Config]
KINDS = ("sign-flip", "scale", "noise", "label-flip", "free-rider", "claim-examples")
PLAIN = ("engine.kernel=plain", "stop.updates=40")


def attack(kind: str, *settings: str, devices: float = 0.3) -> tuple[str, ...]:
    return (f"attack.kind={kind}", f"attack.devices={devices}", *settings)


def model(config: Config) -> Tensor:
    """The model at the end of a run without files."""
    experiment = Experiment(config)
    server = experiment.server()
    experiment.engine(server).run(experiment.bounds(server.strategy), lambda: True)
    return server.store.head_params()


@pytest.fixture(scope="module")
def plain(tiny: MakeConfig) -> Tensor:
    return model(tiny(*PLAIN))


@pytest.mark.parametrize(
    "off",
    [
        attack("sign-flip", devices=0.0),
        attack("none"),
        attack("sign-flip", "attack.begin=40"),
        attack("label-flip", "attack.begin=40"),
        attack("scale", "attack.strength=1.0", devices=1.0),
        attack("claim-examples", "attack.strength=1.0", devices=1.0),
    ],
)
def test_without_a_hostile_update_it_is_the_plain_run(
    tiny: MakeConfig, plain: Tensor, off: tuple[str, ...]
) -> None:
    assert torch.equal(model(tiny(*PLAIN, *off)), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_the_run_and_is_repeatable_with_any_kernel(
    tiny: MakeConfig, kind: str
) -> None:
    # fedavg: its weights are the numbers of examples.
    settings = (*PLAIN, "strategy.name=fedavg", *attack(kind, "attack.strength=3.0"))
    one, again = (model(tiny(*settings, "attack.begin=10")) for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one, model(tiny(*PLAIN, "strategy.name=fedavg")))
    batched = model(tiny(*settings, "attack.begin=10", "engine.kernel=batched"))
    assert (one - batched).abs().max() / one.abs().max() < 1e-5


@pytest.mark.slow  # the first run compiles the kernel
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_kernel_too(tiny: MakeConfig, kind: str) -> None:
    settings = (*PLAIN, *attack(kind, "attack.strength=3.0", "attack.begin=10"))
    one, compiled = model(tiny(*settings)), model(tiny(*settings, "engine.kernel=compiled"))
    assert (one - compiled).abs().max() / one.abs().max() < 1e-5


class Killed(BaseException):
    """Stands for a kill: no checkpoint is written."""


class DiesAfter(Silent):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= self.updates:
            raise Killed


@pytest.mark.parametrize(
    ("kind", "kernel"), [("label-flip", "batched"), ("noise", "plain"), ("sign-flip", "batched")]
)
def test_a_resumed_run_has_the_same_hostile_devices_and_the_same_hash(
    tiny: MakeConfig, tmp_path: Path, kind: str, kernel: str
) -> None:
    settings = ("attack.begin=20", "stop.updates=45", "checkpoint.every=7", "fleet.jitter=0.4")
    config = tiny(f"engine.kernel={kernel}", *attack(kind, *settings))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = start_run(config, whole)["model_hash"]
    with pytest.raises(Killed):
        start_run(config, cut, DiesAfter(16))
    hostile = json.loads((cut / "fleet.json").read_text())["hostile"]
    assert len(hostile) == 3
    with pytest.raises(Killed):
        resume_run(cut, DiesAfter(36))
    assert resume_run(cut)["model_hash"] == expected
    assert sorted(Experiment(config).hostile) == hostile
    assert (cut / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()


def test_claims_of_1e9_examples_reach_the_checks(tiny: MakeConfig, tmp_path: Path) -> None:
    claim = attack("claim-examples", "attack.strength=1e9", "attack.begin=30", devices=0.1)
    start_run(tiny(*PLAIN, "stop.updates=60", *claim), tmp_path / "run")
    (hostile,) = json.loads((tmp_path / "run" / "fleet.json").read_text())["hostile"]
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    refused = [line for line in lines if line["event"] == "refusal"]
    assert {(line["device"], line["reason"]) for line in refused} == {
        (hostile, "num_examples must be a whole number from 1 to 1,000,000,000")
    }


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("attack.kind=sign", "attack.kind = 'sign': must be 'none', 'sign-flip', 'scale'"),
        ("attack.devices=1.5", "attack.devices = 1.5: must be less than or equal to 1"),
        ("attack.devices=-0.1", "attack.devices = -0.1: must be greater than or equal to 0"),
        ("attack.strength=0.0", "attack.strength = 0.0: must be greater than 0"),
        ("attack.strength=1e13", "must be less than or equal to 1000000000000"),
        ("attack.begin=-1", "attack.begin = -1: must be greater than or equal to 0"),
        ("attack.begin=0.5", "attack.begin = 0.5: must be"),
        ("attack.share=0.2", "unknown key 'attack.share'"),
    ],
)
def test_wrong_values_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["latecomer", "run", "--set", setting])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_labels_are_flipped_where_there_are_classes_only(tiny: MakeConfig) -> None:
    with pytest.raises(BadInput, match=r"attack.kind = 'label-flip': needs class labels"):
        Experiment(tiny("objective.loss=mse", "data.partition=iid", *attack("label-flip")))


def test_settings_without_effect_get_a_note(tiny: MakeConfig) -> None:
    def notes(*settings: str) -> list[str]:
        return [note for note in Experiment(tiny(*settings)).notes if "hostile" in note]

    assert notes() == notes(*attack("noise")) == []
    assert len(notes(*attack("noise", devices=0.0))) == len(notes(*attack("none"))) == 1
    pooled = tiny("strategy.name=centralised", *attack("noise"))
    assert not Experiment(pooled).hostile

"""What networks with buffers and frozen parameters allow; test_every_kind.py trains all kinds."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import nn

import latecomer
from latecomer.errors import BadInput
from latecomer.study.config import Config, parse
from latecomer.study.experiment import Experiment
from latecomer.study.runner import start_run
from study.test_resume import start_and_kill


def config(kind: str, **sections: dict[str, object]) -> Config:
    tree: dict[str, dict[str, object]] = {
        "data": {"source": "digits", "partition": "iid"},
        "fleet": {"devices": 6, "profile": "tiers"},
        "model": {"name": f"kinds_of_networks:{kind}"},
        "training": {"local_epochs": 1, "lr": 0.2, "momentum": 0.5},
        "strategy": {"name": "fedbuff", "size": 3},
        "stop": {"updates": 60},
        "checkpoint": {"every": 10},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return parse(tree)


def test_local_buffers_serve_their_device(tmp_path: Path) -> None:
    whole = start_run(config("batchnorm", model={"buffers": "local"}), tmp_path / "run")
    assert whole["client_accuracy"]["mean"] > 0.5
    assert whole["accuracy"] > 0.5


def test_what_a_strategy_cannot_do_with_a_model_is_said_before_the_run() -> None:
    tree = config("batchnorm").model_dump(mode="json", exclude_none=True)
    notes = Experiment(parse({**tree, "strategy": {"name": "feddc"}})).notes
    assert [note for note in notes if "not compensated, because BatchNorm1d at '2' mixes" in note]
    notes = Experiment(parse({**tree, "strategy": {"name": "fedavg"}})).notes
    assert not [note for note in notes if "BatchNorm" in note]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {"epsilon": 5.0}}, "privacy.where = 'step' clips the gradient"),
        ({"training": {"clip": 1.0}}, "training.clip clips the gradient"),
        ({"engine": {"kernel": "batched"}}, "BatchNorm1d at '2' mixes"),
    ],
)
def test_settings_that_a_model_does_not_allow(changes: dict, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        Experiment(config("batchnorm", **changes))
    assert "\n" not in str(caught.value)


def test_updates_and_checkpoints_are_of_the_size_of_what_is_trained(tmp_path: Path) -> None:
    start_and_kill(config("lora", strategy={"name": "ca2fl", "size": 3}), tmp_path / "run", 30)
    latest = (tmp_path / "run/checkpoint/latest").read_text()
    folder = tmp_path / "run/checkpoint" / latest
    sizes = {t.numel() for t in load_file(folder / "state.safetensors").values()}
    assert max(sizes) == 4 * (64 + 64) + 4 * (64 + 10)
    assert json.loads((folder / "state.json").read_text())["format"]


@pytest.mark.parametrize("strategy", ["fedbuff", "latecomer"])
def test_batch_normalisation_with_another_loss(strategy: str, tmp_path: Path) -> None:
    """Statistics are no parameters of the loss, and no server step makes a variance 0."""
    x = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    result = latecomer.run(
        {
            "data": {"partition": "iid"},
            "fleet": {"devices": 10, "profile": "tiers"},
            "training": {"lr": 0.02},
            "stop": {"updates": 100},
        },
        out=tmp_path / "run",
        model=network,
        data=(x, x.sum(1)),
        loss="mse",
        strategy=strategy,
    )
    losses = result.metrics["loss"].to_numpy()
    assert losses[-1] < 0.5 * losses[0]
    assert losses.max() <= 1.1 * losses[0]
    assert load_file(tmp_path / "run/model.safetensors")["1.running_var"].min() > 0.01

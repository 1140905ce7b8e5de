"""Models and training functions given in Python, optimisers, schedules and local steps."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import latecomer
import own_training
from kinds_of_networks import batchnorm
from latecomer.errors import BadInput
from latecomer.study.config import Config, parse
from latecomer.study.experiment import Experiment
from latecomer.study.given import Given
from latecomer.study.runner import resume_run, start_run
from study.test_resume import After, Killed, die, start_and_kill

TREE = {
    "data": {"source": "digits", "partition": "iid"},
    "fleet": {"devices": 5, "profile": "tiers"},
    "model": {"hidden": [8]},
    "training": {"local_epochs": 1, "lr": 0.2},
    "strategy": {"name": "fedbuff", "size": 3},
    "stop": {"updates": 45},
    "checkpoint": {"every": 10},
}


def config(**sections: dict[str, object]) -> Config:
    return parse(
        {name: {**TREE.get(name, {}), **sections.get(name, {})} for name in {**TREE, **sections}}
    )


def learns(folder: Path) -> bool:
    rows = [row.split(",") for row in (folder / "metrics.csv").read_text().splitlines()]
    place = rows[0].index("loss")
    return float(rows[-1][place]) < 0.95 * float(rows[1][place])


def test_a_module_is_the_initial_model_and_is_not_changed(tmp_path: Path) -> None:
    torch.manual_seed(4)
    module = batchnorm()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = latecomer.run(TREE, tmp_path / "one", model=module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    again = latecomer.run(TREE, tmp_path / "two", model=module)
    assert result.summary["model_hash"] == again.summary["model_hash"]
    assert learns(tmp_path / "one")
    other = latecomer.run(TREE, tmp_path / "three", model=batchnorm)
    assert other.summary["model_hash"] != result.summary["model_hash"]
    assert 'name = "kinds_of_networks:batchnorm"' in (tmp_path / "three/config.toml").read_text()
    experiment = Experiment(config(), given=Given(model=module))
    names = experiment.model.layout.names
    assert torch.equal(
        experiment.server().model(), torch.cat([before[name].flatten() for name in names])
    )


def test_a_run_with_a_module_is_resumed_with_it(tmp_path: Path) -> None:
    given = Given(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    whole = start_run(config(), tmp_path / "whole", given=given)
    with pytest.raises(Killed):
        start_run(config(), tmp_path / "killed", After(25, die), given=given)
    with pytest.raises(BadInput, match=r"model\.name = 'given:Sequential'"):
        resume_run(tmp_path / "killed")
    assert resume_run(tmp_path / "killed", given=given)["model_hash"] == whole["model_hash"]


@pytest.mark.parametrize("strategy", ["latecomer", "echopfl"])
def test_a_training_function_learns_and_resumes(strategy: str, tmp_path: Path) -> None:
    changes = {
        "training": {**TREE["training"], "function": "own_training:train"},
        "model": {"name": "kinds_of_networks:both"},
        "strategy": {"name": strategy},
    }
    given = parse({**TREE, **changes})
    whole = start_run(given, tmp_path / "whole")
    assert learns(tmp_path / "whole")
    start_and_kill(given, tmp_path / "killed", 25)
    assert resume_run(tmp_path / "killed")["model_hash"] == whole["model_hash"]
    if strategy == "latecomer":
        assert any("training function of your own" in note for note in Experiment(given).notes)


def test_a_function_of_python_is_the_same_run(tmp_path: Path) -> None:
    named = start_run(config(training={"function": "own_training:train"}), tmp_path / "named")
    result = latecomer.run(TREE, tmp_path / "given", train=own_training.train)
    assert result.summary["model_hash"] == named["model_hash"]
    silent = latecomer.run(TREE, tmp_path / "silent", train=own_training.nothing)
    arrivals = [
        json.loads(line)
        for line in (tmp_path / "silent/events.jsonl").read_text().splitlines()
        if '"arrival"' in line
    ]
    assert silent.summary["updates"] == 45
    assert arrivals


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"privacy": {"epsilon": 5.0}}, "cannot promise differential privacy"),
        ({"submodels": {"level": "declared"}}, "submodels.level"),
        ({"training": {"clip": 1.0}}, "training.clip"),
        ({"personalise": {"finetune_epochs": 1}}, "finetune_epochs"),
        ({"engine": {"kernel": "batched"}}, "training function of your own"),
        ({"training": {"function": "own_training:absent"}}, "has no 'absent'"),
        ({"training": {"function": "own_training:two_arguments"}}, "model, dataset and context"),
    ],
)
def test_what_a_training_function_excludes(sections: dict, words: str) -> None:
    training = {"function": "own_training:train", **sections.pop("training", {})}
    with pytest.raises(BadInput, match=words) as caught:
        Experiment(config(training=training, **sections))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", "returned a str"),
        ("not_a_number", "'loss' is nan"),
        ("none_used", "num_examples = 0"),
        ("unknown_used", "num_examples = nan"),
    ],
)
def test_results_that_cannot_be_used(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        start_run(config(training={"function": f"own_training:{name}"}), tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer", "adamm", "sgd, adam, adamw, rmsprop, adagrad"),
        ("schedule", "cosin", "constant, step, cosine"),
        ("optimizer", "own_training:absent", "has no 'absent'"),
        ("optimizer", "own_training:no_optimizer", "not a torch.optim.Optimizer"),
        ("schedule", "own_training:text", "failed"),
    ],
)
def test_wrong_optimisers_and_schedules(key: str, value: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        start_run(config(training={key: value}), tmp_path / "run")


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
        {"optimizer": "rmsprop", "lr": 0.005},
        {"optimizer": "adagrad", "lr": 0.05},
        {"optimizer": "own_training:lion"},
        {"schedule": "cosine"},
        {"schedule": "step", "schedule_versions": 4},
        {"schedule": "own_training:halved"},
        {"local_steps": 3},
    ],
    ids=str,
)
def test_kernels_train_the_same_programs(training: dict, tmp_path: Path) -> None:
    given = config(training=training, stop={"updates": 15})
    batched = start_run(given, tmp_path / "batched")
    plain = start_run(
        parse({**given.model_dump(mode="json", exclude_none=True), "engine": {"kernel": "plain"}}),
        tmp_path / "plain",
    )
    assert plain["loss"] == pytest.approx(batched["loss"], rel=1e-3)


def test_a_schedule_counts_versions() -> None:
    experiment = Experiment(config(training={"schedule": "cosine", "schedule_factor": 0.2}))
    assert experiment.config.training.schedule_versions == 15  # 45 updates in buffers of 3
    server = experiment.server()
    assert server.schedule is not None
    assert [server.schedule(v) for v in (0, 15, 99)] == pytest.approx([1.0, 0.2, 0.2])
    stepped = Experiment(config(training={"schedule": "step", "schedule_versions": 4})).server()
    assert [stepped.schedule(v) for v in (0, 3, 4, 9)] == pytest.approx([1, 1, 0.1, 0.01])


def test_local_steps_cost_what_they_train() -> None:
    experiment = Experiment(config(training={"local_steps": 2, "batch_size": 8}))
    client = experiment.clients[0]
    engine = experiment.engine(experiment.server())
    engine._step(0)
    task = next(iter(engine.server.open_tasks.values()))
    plan = client.plan(task)
    assert plan.order.shape == (2, 8)
    assert client.examples(task) == 16

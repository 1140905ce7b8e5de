"""Flower's own strategies in virtual time: the same data, devices and clock as ours."""

import json
import random

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx, FedTrimmedAvg
from safetensors.torch import load_file

import latecomer
from latecomer.core.server import Server
from latecomer.errors import BadInput, RunFailed
from latecomer.strategies.parts.flower_rounds import from_flower
from latecomer.study.runner import resume_run

NAME = "flwr.serverapp.strategy:FedAvg"

ALL = {"fraction_evaluate": 0.0}  # every device trains; our own fedavg evaluates on no device


def tree(**changes):
    base = {
        "seed": 3,
        "data": {"source": "digits", "alpha": 0.5},
        "fleet": {"devices": 6, "profile": "phones"},
        "model": {"hidden": [8]},
        "training": {"lr": 0.1},
        "stop": {"epochs": 3},
        "engine": {"kernel": "plain"},
    }
    for name, value in changes.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def ran(folder, by, **changes):
    return latecomer.run(tree(**changes), folder, strategy=by)


def model_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def lines(folder, kind):
    found = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in found if line["event"] == kind]


def table(result):
    return result.metrics.drop(columns="wall_seconds")


@pytest.mark.parametrize("profile", ["uniform", "phones"])
def test_flowers_fedavg_is_ours(tmp_path, profile):
    """Of all devices in each round: the same models, at the same moments, in the same files."""
    fleet = {"fleet": {"profile": profile}}
    theirs = ran(tmp_path / "theirs", FedAvg(**ALL), **fleet)
    ours = ran(tmp_path / "ours", None, strategy={"name": "fedavg"}, **fleet)
    assert torch.allclose(model_of(tmp_path / "theirs"), model_of(tmp_path / "ours"), atol=1e-6)
    assert theirs.summary["virtual_seconds"] == ours.summary["virtual_seconds"] > 0
    assert theirs.summary["updates"] == ours.summary["updates"] >= 12
    assert theirs.summary["versions"] == ours.summary["versions"] == 3
    assert theirs.summary["bytes"]["up"] == ours.summary["bytes"]["up"]
    a, b = table(theirs), table(ours)
    assert list(a["virtual_seconds"]) == list(b["virtual_seconds"])
    assert list(a["accuracy"]) == pytest.approx(list(b["accuracy"]), abs=0.01)
    assert {p.name for p in (tmp_path / "theirs").iterdir()} == {
        p.name for p in (tmp_path / "ours").iterdir() if p.name != "checkpoint"
    }


def test_the_servers_own_costs_are_the_same(tmp_path):
    costs = {"server": {"merge_seconds": 0.5, "evaluate_seconds": 0.25}}
    theirs = ran(tmp_path / "theirs", FedAvg(**ALL), **costs)
    ours = ran(tmp_path / "ours", None, strategy={"name": "fedavg"}, **costs)
    assert theirs.summary["virtual_seconds"] == ours.summary["virtual_seconds"]


def test_flowers_fedprox_is_ours(tmp_path):
    ran(tmp_path / "theirs", FedProx(proximal_mu=0.5, **ALL))
    ran(tmp_path / "ours", None, strategy={"name": "fedprox", "mu": 0.5})
    assert torch.allclose(model_of(tmp_path / "theirs"), model_of(tmp_path / "ours"), atol=1e-6)


@pytest.mark.parametrize("strategy", [FedTrimmedAvg, FedMedian, FedAdam])
def test_others_learn_too(tmp_path, strategy):
    summary = ran(tmp_path / "run", strategy(**ALL)).summary
    assert summary["versions"] == 3
    assert summary["strategy"] == f"flower-{strategy.__name__}"


def test_by_name_and_with_options_as_in_a_config(tmp_path):
    name = "flwr.serverapp.strategy:FedAvg"
    options = {"name": name, "fraction_train": 0.5, **ALL}
    fleet = {"profile": "uniform"}
    summary = ran(tmp_path / "run", None, strategy=options, fleet=fleet).summary
    assert summary["strategy"] == name
    assert summary["updates"] == 9
    assert "fraction_train = 0.5" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction_trian": 0.5}, "did you mean 'fraction_train'"),
        ({"fraction_train": "half"}, "strategy.fraction_train"),
        ({"min_train_nodes": 7}, "min_train_nodes = 7: the fleet has 6 devices"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, options, message):
    named = {"name": "flwr.serverapp.strategy:FedAvg", **options}
    with pytest.raises(BadInput, match=message):
        ran(tmp_path / "run", None, strategy=named)
    assert not (tmp_path / "run").exists()


def test_sub_models_are_not_for_flowers_strategies(tmp_path):
    with pytest.raises(BadInput, match="one model for all devices"):
        ran(tmp_path / "run", FedAvg(**ALL), submodels={"level": "declared"})


def test_which_nodes_are_sampled_hangs_on_the_seed_alone(tmp_path):
    half = {"fraction_train": 0.5, **ALL}
    devices = []
    for i in range(3):
        random.seed(i)
        ran(tmp_path / str(i), FedAvg(**half), seed=5 if i < 2 else 6)
        devices.append([line["device"] for line in lines(tmp_path / str(i), "dispatch")])
    assert devices[0] == devices[1] != devices[2]


def test_evaluation_on_devices_takes_its_time(tmp_path):
    fleet = {"profile": "tiers"}
    plain = ran(tmp_path / "plain", FedAvg(**ALL), fleet=fleet).summary
    asked = ran(tmp_path / "asked", FedAvg(), fleet=fleet).summary
    assert asked["virtual_seconds"] > plain["virtual_seconds"]
    assert asked["bytes"]["down"] > plain["bytes"]["down"]
    assert torch.allclose(model_of(tmp_path / "asked"), model_of(tmp_path / "plain"), atol=1e-6)


def test_a_round_can_be_cut_short(tmp_path):
    whole = ran(tmp_path / "whole", FedAvg(**ALL), fleet={"profile": "tiers"})
    strategy = from_flower(FedAvg(**ALL), timeout=whole.summary["virtual_seconds"] / 6)
    cut = ran(tmp_path / "cut", strategy, fleet={"profile": "tiers"})
    assert cut.summary["virtual_seconds"] < whole.summary["virtual_seconds"]
    assert cut.summary["updates"] < 18
    assert {line["reason"] for line in lines(tmp_path / "cut", "drop")} <= {"its round is closed"}


@pytest.mark.parametrize(
    "stop", [{"updates": 10}, {"virtual_seconds": 1.0}, {"epochs": 2, "updates": 9}]
)
def test_any_bound_ends_it(tmp_path, stop):
    summary = ran(tmp_path / "run", FedAvg(**ALL), stop={"epochs": 0, **stop}).summary
    assert summary["ended_by"] in stop


def test_lost_devices_are_failures_to_flower(tmp_path):
    summary = ran(tmp_path / "run", FedAvg(**ALL), fleet={"crash": 0.5}).summary
    assert summary["dropped"] > 0
    assert summary["versions"] <= 3
    assert summary["updates"] + summary["dropped"] >= 6


def test_devices_that_are_away_are_waited_for(tmp_path):
    assert ran(tmp_path / "run", FedAvg(**ALL), fleet={"devices": 12}).summary["versions"] == 3


class UnknownKey(FedAvg):
    """A strategy with a config key that clients do not know."""

    def configure_train(self, server_round, arrays, config, grid):
        config["clipping-norm"] = 1.0
        return super().configure_train(server_round, arrays, config, grid)


class Personal(FedAvg):
    """A strategy with a model for each node."""

    def configure_train(self, server_round, arrays, config, grid):
        for node in grid.get_node_ids():
            own = {name: array.numpy() + node for name, array in arrays.items()}
            record = ArrayRecord({k: type(arrays[k])(v) for k, v in own.items()})
            yield Message(RecordDict({"a": record, "c": ConfigRecord()}), node, "train")


@pytest.mark.parametrize(
    ("strategy", "message"), [(UnknownKey, "clipping-norm"), (Personal, "different models")]
)
def test_what_cannot_be_simulated_is_an_error(tmp_path, strategy, message):
    with pytest.raises(RunFailed, match=message):
        ran(tmp_path / "run", strategy(**ALL))


class OneByOne(FedAvg):
    """A loop of its own over push and pull, without rounds."""

    def start(self, grid, initial_arrays, **more):
        arrays, content = initial_arrays, {"config": ConfigRecord({"lr": 0.05})}
        waiting = set()
        for _ in range(12):
            nodes = set(grid.get_node_ids())
            sent = [
                Message(RecordDict({"arrays": arrays, **content}), node, "train") for node in nodes
            ]
            waiting |= set(grid.push_messages(sent))
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                arrays = reply.content["arrays"]


def test_an_asynchronous_loop_of_ones_own_runs_too(tmp_path):
    summary = ran(tmp_path / "run", OneByOne(), stop={"epochs": 0, "updates": 100}).summary
    assert summary["ended_by"] == "the strategy has done its rounds"
    assert summary["versions"] >= 5


def test_an_interrupted_run_begins_anew(tmp_path, monkeypatch):
    whole = ran(tmp_path / "whole", None, strategy={"name": NAME, **ALL})
    handle, calls = Server.handle, iter(range(8))

    def killed(self, *events):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return handle(self, *events)

    with monkeypatch.context() as patch:
        patch.setattr(Server, "handle", killed)
        with pytest.raises(KeyboardInterrupt):
            ran(tmp_path / "run", None, strategy={"name": NAME, **ALL})
    again = resume_run(tmp_path / "run")
    assert again["model_hash"] == whole.summary["model_hash"]

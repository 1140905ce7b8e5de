"""Unchanged Flower apps in virtual time."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

import latecomer
from flower_apps import APPS, migrated
from latecomer.device.seeding import all_seeded
from latecomer.device.training import layer_stream
from latecomer.engines.app_client import packed_state, unpacked_state
from latecomer.engines.app_loading import first_request, load_app
from latecomer.engines.flower_private import allow_messages, set_message_id
from latecomer.errors import BadInput, RunFailed
from latecomer.strategies.recipe import build_strategy
from latecomer.study.app_scenario import updates_per_version
from latecomer.study.config import parse
from latecomer.study.data_view import data_view

STRATEGIES = ("fedavg", "fedasync", "fedbuff", "ca2fl", "latecomer")


def config(app: str, strategy: str, devices: int = 3, **more) -> dict:
    return {
        "app": {"path": str(APPS / app), **more.pop("app", {})},
        "fleet": {"devices": devices, "profile": "tiers"},
        "strategy": {"name": strategy, **({"size": 2} if strategy in ("fedbuff", "ca2fl") else {})},
        **more,
    }


# An app in numpy that keeps what it saw.


def recording_app(seen: list) -> ClientApp:
    def mod(message: Message, context: Context, call):
        seen.append(("mod", message.metadata.message_type))
        return call(message, context)

    app = ClientApp(mods=[mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {name: a.numpy() for name, a in message.content["arrays"].items()}
        state = context.state.setdefault("mine", ConfigRecord({"tasks": 0, "key": b"\x00\xff"}))
        state["tasks"] += 1
        context.state["model"] = ArrayRecord({"w": Array(arrays["w"])})
        seen.append(
            (
                "train",
                context.node_config["partition-id"],
                state["tasks"],
                dict(message.content["config"]),
                {name: str(a.dtype) for name, a in arrays.items()},
                np.random.rand(),
                torch.rand(1).item(),
            )
        )
        step = np.float64(context.node_config["partition-id"] + 1)
        arrays["w"] = arrays["w"] + step + 0.01 * np.random.rand(2)
        arrays["seen"] = arrays["seen"] + 1
        metrics = {"num-examples": 10 * (context.node_config["partition-id"] + 1), "each": [1.0]}
        content = RecordDict(
            {
                "arrays": ArrayRecord({name: Array(a) for name, a in arrays.items()}),
                "metrics": MetricRecord(metrics),
            }
        )
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        context.state["evaluated"] = ConfigRecord({"yes": True})
        w = message.content["arrays"]["w"].numpy()
        metrics = {"distance": float(abs(w - 2).sum()), "num-examples": 5}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


INITIAL = {"w": np.zeros(2), "seen": np.zeros(1, dtype=np.int64)}


def run_recorded(out: Path, seen: list, **changes):
    tree = {
        "fleet": {"devices": 3},
        "app": {"node": {"site": "ward 7"}, "config": {"local-epochs": 2}},
        "stop": {"updates": 9},
        **changes,
    }
    return latecomer.run(
        tree, out, "fedavg", client_app=recording_app(seen), initial_arrays=INITIAL
    )


def test_an_app_is_called_as_flower_calls_it(tmp_path):
    seen: list = []
    result = run_recorded(tmp_path / "run", seen)
    trained = [each for each in seen if each[0] == "train"]
    # Three rounds on three devices; the first tasks also gave the numbers of examples.
    assert sorted(each[1:3] for each in trained) == [(d, n) for d in range(3) for n in (1, 2, 3)]
    assert all(each[3] == {"server-round": each[2]} for each in trained)
    assert {each[4]["w"] for each in trained} == {"float64"}
    assert {each[4]["seen"] for each in trained} == {"int64"}
    assert len({each[5:] for each in trained}) == 9  # every task has its own random numbers
    assert seen.count(("mod", "train")) == 9
    summary = result.summary
    assert summary["source"] == "client_app"
    assert summary["objective"]["metric"] == "distance"
    assert summary["objective"]["lower_is_better"]
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert model["seen"].tolist() == [3]  # of the newest update
    assert model["w"].dtype == np.float64
    assert model["w"] == pytest.approx([7.0, 7.0], abs=0.1)  # 3 rounds of (1 + 2 * 2 + 3 * 3) / 6
    again: list = []
    assert run_recorded(tmp_path / "again", again).summary["model_hash"] == summary["model_hash"]
    assert again == seen


def test_the_time_of_a_task_follows_its_examples(tmp_path):
    fleet = {"devices": 3, "seconds_per_example": 1.0, "seconds_per_task": 0.0}
    run_recorded(tmp_path / "run", [], fleet=fleet, stop={"updates": 3})
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    spans = {line["device"]: line["spans"][1] for line in lines if line["event"] == "arrival"}
    assert spans == {0: 20.0, 1: 40.0, 2: 60.0}  # two passes over 10, 20 and 30 examples


def test_a_resumed_run_has_the_state_of_its_contexts(tmp_path, monkeypatch):
    seen: list = []
    whole = run_recorded(tmp_path / "whole", seen)
    from latecomer.study.runner import _Run

    kept = _Run._after_step

    def interrupted(self):
        return kept(self) and self.server.accepted < 6

    monkeypatch.setattr(_Run, "_after_step", interrupted)
    with pytest.raises(RunFailed, match="interrupted"):
        run_recorded(tmp_path / "part", [])
    monkeypatch.undo()
    later: list = []
    resumed = latecomer.run(
        resume=tmp_path / "part", client_app=recording_app(later), initial_arrays=INITIAL
    )
    assert resumed.summary["model_hash"] == whole.summary["model_hash"]
    trained = [each for each in later if each[0] == "train"]
    assert sorted(each[1:3] for each in trained) == [(0, 3), (1, 3), (2, 3)]
    (tmp_path / "whole" / "summary.json").unlink()
    with pytest.raises(BadInput, match=r"app.path = 'given:client_app'.*given in Python"):
        latecomer.run(resume=tmp_path / "whole")


def test_a_state_is_packed_and_unpacked():
    state = RecordDict(
        {
            "a": ArrayRecord({"w": Array(np.arange(3.0)), "none": Array(np.zeros(0))}),
            "m": MetricRecord({"loss": 0.5, "each": [1, 2]}),
            "c": ConfigRecord({"b": b"\x00\xff", "s": ["x", "y"], "t": True, "n": 3}),
        }
    )
    found = unpacked_state(packed_state(state))
    assert found == state
    assert found["a"]["w"].numpy().tolist() == [0.0, 1.0, 2.0]
    assert unpacked_state(packed_state(RecordDict())) == RecordDict()


# Flower's own FedAvg on the same app.


class DirectGrid(Grid):
    """Calls the ClientApp at once, with the random numbers of the simulation's tasks."""

    def __init__(self, app: ClientApp, run_config: dict, devices: int, seed: int) -> None:
        self.app, self.seed, self.done = app, seed, dict.fromkeys(range(devices), 0)
        self.contexts = [
            Context(
                1,
                1000 + device,
                {"partition-id": device, "num-partitions": devices},
                RecordDict(),
                dict(run_config),
            )
            for device in range(devices)
        ]

    def set_run(self, run): ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **named):
        raise NotImplementedError

    def get_node_ids(self):
        return [1000 + device for device in self.done]

    def push_messages(self, messages):
        raise NotImplementedError

    pull_messages = push_messages

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            device = message.metadata.dst_node_id - 1000
            set_message_id(message, "message")
            stream = layer_stream(self.seed, device, self.done[device])
            self.done[device] += message.metadata.message_type == "train"
            with all_seeded(stream.seed):
                replies.append(self.app(message, self.contexts[device]))
        return replies


def flowers_fedavg(folder: Path, devices: int, rounds: int, seed: int, monkeypatch) -> dict:
    """The final arrays of the app's own ServerApp."""
    app = load_app(folder)
    results = []
    start = FedAvg.start

    def kept(self, *args, **named):
        results.append(start(self, *args, **named))
        return results[-1]

    monkeypatch.setattr(FedAvg, "start", kept)
    run_config = {**app.config, "num-server-rounds": rounds}
    with allow_messages(), all_seeded(seed):
        grid = DirectGrid(app.client_app, run_config, devices, seed)
        app.server_app(grid, Context(1, 0, {}, RecordDict(), run_config))
    monkeypatch.undo()
    return {name: array.numpy() for name, array in results[0].arrays.items()}


@pytest.mark.parametrize(
    "app", [pytest.param("torch_app", marks=pytest.mark.slow), "numpy_app", "sklearn_app"]
)
def test_fedavg_in_virtual_time_is_flowers_fedavg(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    latecomer.run(config(app, "fedavg", seed=4), "run")
    ours = load_file("run/model.safetensors")
    theirs = flowers_fedavg(APPS / app, 3, 3, 4, monkeypatch)
    assert set(ours) == set(theirs)
    floats = [name for name, array in ours.items() if array.dtype.kind == "f"]
    assert floats
    for name in floats:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("app", ["torch_app", "numpy_app", "sklearn_app"])
def test_apps_run_unchanged_with_the_same_hash_twice(app, strategy, tmp_path):
    found = []
    for name in ("one", "two"):
        result = latecomer.run(config(app, strategy), tmp_path / name)
        assert result.summary["updates"] == 9
        assert result.summary["refused"] == 0
        found.append(result.summary["model_hash"])
    assert found[0] == found[1]
    note = "latecomer: late updates are not compensated, because devices run a ClientApp"
    assert result.summary["notes"] == ([note] if strategy == "latecomer" else [])


# What cannot be run is refused in one line.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": {"name": "feddc"}}, "strategy 'feddc' needs the exact training program"),
        ({"strategy": {"name": "heterofl"}}, "strategy 'heterofl' needs devices that train sub"),
        ({"strategy": {"name": "ifca"}}, "strategy 'ifca' needs reports.*the nearest .* is fedavg"),
        ({"privacy": {"epsilon": 1.0}}, "privacy.epsilon = 1.0: a Flower app has its own"),
        ({"training": {"lr": 0.5}}, "training.lr = 0.5: a Flower app has its own"),
        ({"fleet": {"late": {"classes": [1]}}}, "fleet.late.classes: the data of a Flower app"),
        ({"app": {"config": {"local-epoch": 1}}}, "'local-epoch' is unknown; did you mean 'local-"),
        ({"app": {"path": "nowhere"}}, "nowhere: not a Flower app"),
        ({"app": {"examples": [5]}}, "app.examples has 1 numbers for 10 devices"),
        ({"app": {"metric": "acc"}}, "app.metric 'acc' is unknown; did you mean 'accuracy'"),
        ({"app": {"initial": "math:pi"}}, "non-callable 'pi'"),
    ],
)
def test_what_an_app_cannot_do_is_refused(change, message, tmp_path):
    tree = {"app": {"path": str(APPS / "sklearn_app")}, "fleet": {"devices": 10}}
    tree = {name: {**tree.get(name, {}), **change.get(name, {})} for name in {*tree, *change}}
    with pytest.raises(BadInput, match=message):
        latecomer.run(tree, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_commands_that_read_the_data_refuse_an_app():
    tree = {"app": {"path": str(APPS / "numpy_app")}}
    with pytest.raises(BadInput, match="the data of a Flower app are its own"):
        data_view(parse(tree))
    with pytest.raises(BadInput, match="advice reads the data of devices"):
        latecomer.advise(tree)


def silent(grid, context):
    """A main function that sends nothing."""


def broken(grid, context):
    raise KeyError("rounds")


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (silent, "ended without sending a model; name a function that returns the initial arrays"),
        (broken, "the ServerApp raised KeyError: 'rounds' \\(at test_flower_apps.py:"),
    ],
)
def test_a_server_app_without_arrays_is_refused(main, message, tmp_path):
    server = ServerApp()
    server.main()(main)
    with pytest.raises(BadInput, match=message):
        latecomer.run(client_app=recording_app([]), server_app=server, out=tmp_path / "run")


def test_apps_of_the_earlier_kind_are_refused(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(BadInput, match="the ServerApp has no main function, only a server_fn"):
        latecomer.run(client_app=recording_app([]), server_app=ServerApp(server_fn=dict), out=out)
    app = ClientApp(client_fn=lambda context: None)
    with pytest.raises(BadInput, match="its ClientApp is made of a client_fn"):
        latecomer.run(client_app=app, initial_arrays=INITIAL, out=out)


def test_a_loop_over_the_grid_gives_its_first_message(tmp_path):
    server, seen = ServerApp(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        record = ArrayRecord({name: Array(a) for name, a in INITIAL.items()})
        content = RecordDict({"arrays": record, "config": ConfigRecord({"lr": 0.5})})
        grid.push_messages([Message(content, node, "train") for node in grid.get_node_ids()])

    tree = {"fleet": {"devices": 2}, "stop": {"updates": 2}}
    latecomer.run(tree, tmp_path / "run", client_app=recording_app(seen), server_app=server)
    assert {each[3]["lr"] for each in seen if each[0] == "train"} == {0.5}


def test_an_app_with_the_two_lines_changed_is_asked_for_the_same(tmp_path):
    found = []
    for folder in (APPS / "torch_app", migrated(tmp_path)):
        app = load_app(folder)
        found.append(first_request(app.server_app, app.config, 4, seed=3))
    before, after = found
    arrays = ArrayRecord({name: Array(array) for name, array in after.arrays.items()})
    assert after.train_config == before.train_config == {"lr": 0.01}
    assert after.rounds == before.rounds == 3
    assert after.evaluate_fn(0, arrays).keys() == {"loss", "accuracy"}
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(after.arrays[name], array)


def test_errors_of_an_app_name_device_and_place(tmp_path):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("no data here")

    with pytest.raises(RunFailed, match=r"device 0: the app's train function: ValueError: no data"):
        latecomer.run(client_app=app, initial_arrays=INITIAL, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, "'num-examples' is missing in its MetricRecord"),
        ({"num-examples": 5}, "does the app's train function give NaN"),
    ],
)
def test_a_reply_that_cannot_be_used_says_what_to_change(metrics, words, tmp_path):
    app = recording_app([])
    bad = ClientApp(mods=[])

    @bad.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {**INITIAL, "w": np.full(2, np.nan)}
        records = {
            "arrays": ArrayRecord({name: Array(a) for name, a in arrays.items()}),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(records), reply_to=message)

    @bad.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return app(message, context)

    with pytest.raises(RunFailed, match=words):
        latecomer.run(client_app=bad, initial_arrays=INITIAL, out=tmp_path / "run")


def test_the_pyproject_of_an_app_is_no_config(tmp_path):
    with pytest.raises(BadInput, match="not a config; for a Flower app give its folder"):
        latecomer.run(tmp_path / "pyproject.toml")


@pytest.mark.parametrize(
    ("name", "devices", "updates"),
    [("latecomer", 500, 10), ("latecomer", 25, 3), ("fedbuff", 500, 10), ("fedavg", 500, 500)],
)
def test_updates_per_version_are_those_of_the_strategys_commits(name, devices, updates):
    assert updates_per_version(build_strategy(name, {}), devices) == updates

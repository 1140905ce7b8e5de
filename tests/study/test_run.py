"""What a run writes, and that it is what happened."""

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from latecomer.errors import BadInput, RunFailed
from latecomer.study import files, runner
from latecomer.study.config import Config, load_config
from latecomer.study.experiment import Experiment
from latecomer.study.results import Result, flatten, load
from latecomer.study.runner import start_run

MakeConfig = Callable[..., Config]
Run = tuple[Path, dict[str, Any]]
Start = Callable[..., Run]

# 8 x 8 pixels -> 8 -> 10 classes.
PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def arrivals(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["event"] == "arrival"]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def plain(start: Start) -> Run:
    return start("evaluate.every=20", "checkpoint.every=25")


def test_all_files_are_there(plain: Run) -> None:
    folder, _ = plain
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.toml",
        "metrics.csv",
        "events.jsonl",
        "model.safetensors",
        "summary.json",
        "devices.csv",
        "fleet.json",
        "checkpoint",
    }


def test_the_columns_of_metrics_csv(plain: Run) -> None:
    header = (plain[0] / "metrics.csv").read_text().splitlines()[0]
    fixed = (
        "updates,version,virtual_seconds,wall_seconds,"
        "loss,accuracy,balanced_accuracy,macro_f1,accuracy_affected"
    )
    assert header == ",".join([fixed, *(f"f1_{digit}" for digit in range(10))])


def test_metrics_have_a_row_per_evaluation(plain: Run) -> None:
    folder, summary = plain
    table = rows(folder)
    assert [int(row["updates"]) for row in table] == [0, 20, 40, 60]
    # fedasync commits every update at once; a task takes 10 s on the uniform fleet.
    assert [int(row["version"]) for row in table] == [0, 20, 40, 60]
    assert [float(row["virtual_seconds"]) for row in table] == [0, 20, 40, 60]
    assert all(row["accuracy_affected"] == "" for row in table)
    last = table[-1]
    for name in ("loss", "accuracy", "balanced_accuracy", "macro_f1"):
        assert float(last[name]) == summary[name]
    assert float(last["accuracy"]) > float(table[0]["accuracy"])


def test_the_summary_has_the_keys_of_the_interface(plain: Run) -> None:
    folder, summary = plain
    assert summary == json.loads((folder / "summary.json").read_text())
    named = (
        "strategy, source, model, devices, seed, updates, versions, virtual_seconds, "
        "wall_seconds, loss, accuracy, balanced_accuracy, macro_f1, accuracy_affected, f1, "
        "staleness, bytes, epsilon, compensation, clusters, client_accuracy, model_hash"
    )
    assert ", ".join(list(summary)[: named.count(",") + 1]) == named
    assert list(summary["f1"]) == [str(digit) for digit in range(10)]
    assert set(summary["staleness"]) == {"mean", "max"}
    assert set(summary["bytes"]) == {"up", "down"}
    assert set(summary["client_accuracy"]) == {"mean", "worst", "late_mean"}
    assert summary["accuracy_affected"] is None
    assert summary["client_accuracy"]["late_mean"] is None
    assert summary["epsilon"] is summary["compensation"] is summary["clusters"] is None


def test_the_summary_says_what_was_run(plain: Run) -> None:
    summary = plain[1]
    wanted = {"strategy": "fedasync", "source": "digits", "model": "mlp", "devices": 10, "seed": 1}
    assert {key: summary[key] for key in wanted} == wanted
    assert (summary["updates"], summary["versions"], summary["virtual_seconds"]) == (60, 60, 60.0)
    own = summary["client_accuracy"]
    assert 0 <= own["worst"] <= own["mean"] <= 1


def test_events_have_time_and_kind(plain: Run) -> None:
    found = lines(plain[0])
    times = [line["time"] for line in found]
    assert times == sorted(times)
    counts = Counter(line["event"] for line in found)
    # Every device works all the time: 60 came in, and 10 more tasks are open at the end.
    assert counts == {"dispatch": 70, "arrival": 60, "commit": 60}
    for line in found:
        if line["event"] == "arrival":
            assert {"device", "sent", "version", "staleness", "weight", "bytes"} <= set(line)
            assert line["staleness"] == line["version"] - line["sent"]


def test_the_staleness_of_the_summary_is_that_of_the_events(plain: Run) -> None:
    folder, summary = plain
    found = [line["staleness"] for line in arrivals(folder)]
    assert summary["staleness"] == {
        "mean": pytest.approx(np.mean(found)),
        "max": max(found),
    }
    assert max(found) > 0


def test_bytes_add_up(plain: Run) -> None:
    folder, summary = plain
    assert summary["bytes"] == {"up": 60 * 4 * PARAMETERS, "down": 70 * 4 * PARAMETERS}
    assert sum(line["bytes"] for line in arrivals(folder)) == summary["bytes"]["up"]


def file_hash(path: Path, order: tuple[str, ...]) -> str:
    tensors = load_file(path)
    assert set(tensors) == set(order)
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    whole = np.concatenate([tensors[name].ravel() for name in order])
    return hashlib.sha256(whole.astype("<f4").tobytes()).hexdigest()


def test_the_hash_is_that_of_the_model_on_disk(plain: Run) -> None:
    folder, summary = plain
    layout = Experiment(load_config(folder / "config.toml")).model.layout
    assert layout.size == PARAMETERS
    assert file_hash(folder / "model.safetensors", layout.names) == summary["model_hash"]


def test_the_accuracy_is_that_of_the_model_on_disk(plain: Run) -> None:
    folder, summary = plain
    tensors = load_file(folder / "model.safetensors")
    experiment = Experiment(load_config(folder / "config.toml"))
    (w1, b1), (w2, b2) = (
        (tensors[name], tensors[name.replace("weight", "bias")])
        for name in experiment.model.layout.names
        if name.endswith("weight")
    )
    test = experiment.federation.test
    hidden = np.maximum(test.x.numpy().reshape(len(test.y), -1) @ w1.T + b1, 0)
    predicted = (hidden @ w2.T + b2).argmax(axis=1)
    assert np.mean(predicted == test.y.numpy()) == pytest.approx(summary["accuracy"])


def test_the_config_on_disk_runs_to_the_same_model(plain: Run, tmp_path: Path) -> None:
    folder, summary = plain
    again = start_run(load_config(folder / "config.toml"), tmp_path / "again")
    assert again["model_hash"] == summary["model_hash"]
    before, after = (folder / "config.toml", tmp_path / "again" / "config.toml")
    assert before.read_text() == after.read_text()


@pytest.mark.parametrize(
    "setting",
    ["seed=1", "evaluate.every=7", "checkpoint.every=3", "checkpoint.seconds=0.0001"],
)
def test_the_same_seed_gives_the_same_model_however_it_is_watched(
    start: Start, plain: Run, setting: str
) -> None:
    folder, summary = start(setting)
    assert summary["model_hash"] == plain[1]["model_hash"]
    assert (folder / "events.jsonl").read_bytes() == (plain[0] / "events.jsonl").read_bytes()


@pytest.mark.parametrize("setting", ["seed=2", "training.lr=0.11", "strategy.alpha=0.5"])
def test_another_run_gives_another_model(start: Start, plain: Run, setting: str) -> None:
    assert start(setting)[1]["model_hash"] != plain[1]["model_hash"]


@pytest.mark.parametrize("updates", [1, 7, 25])
@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "fedbuff", "standalone"])
def test_the_bound_on_updates_is_exact(start: Start, strategy: str, updates: int) -> None:
    folder, summary = start(f"strategy.name={strategy}", f"stop.updates={updates}")
    assert summary["updates"] == updates == len(arrivals(folder))
    assert int(rows(folder)[-1]["updates"]) == updates
    assert summary["ended_by"] == "updates"


def test_the_bound_on_virtual_seconds(start: Start) -> None:
    """A task takes 10 s: those that come in at 30 s count, and nothing after it."""
    _, summary = start("stop.updates=0", "stop.virtual_seconds=35")
    assert (summary["updates"], summary["virtual_seconds"]) == (30, 30.0)
    assert summary["ended_by"] == "virtual_seconds"
    assert start("stop.updates=0", "stop.virtual_seconds=30")[1]["updates"] == 30


def test_the_bound_on_epochs(start: Start) -> None:
    _, summary = start("strategy.name=fedavg", "stop.updates=0", "stop.epochs=4")
    assert (summary["versions"], summary["updates"]) == (4, 40)
    assert summary["ended_by"] == "epochs"
    # A strategy without epochs works as long as four epochs of the fleet last.
    _, summary = start("strategy.name=fedasync", "stop.updates=0", "stop.epochs=4")
    assert (summary["virtual_seconds"], summary["updates"]) == (40.0, 40)


def test_the_first_bound_ends_the_run(start: Start) -> None:
    _, summary = start("stop.updates=15", "stop.virtual_seconds=35")
    assert (summary["updates"], summary["ended_by"]) == (15, "updates")


def test_standalone_writes_a_model_for_each_device(start: Start) -> None:
    folder, summary = start("strategy.name=standalone")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-device-{device}.safetensors" for device in range(10)]
    assert len({(folder / name).read_bytes() for name in names}) == 10
    assert summary["updates"] == 60


def test_centralised_is_one_machine(start: Start) -> None:
    folder, summary = start("strategy.name=centralised", "stop.updates=3")
    assert (summary["updates"], summary["versions"], summary["devices"]) == (3, 3, 10)
    assert {line["device"] for line in arrivals(folder)} == {0}
    assert [int(row["updates"]) for row in rows(folder)] == [0, 1, 2, 3]


def test_held_out_clients_do_no_work(start: Start) -> None:
    folder, summary = start("data.test=held-out-clients")
    clients = Experiment(load_config(folder / "config.toml")).federation.clients
    held_out = {device for device, client in enumerate(clients) if not len(client.train.y)}
    assert len(held_out) == 2
    assert {line["device"] for line in arrivals(folder)} == set(range(10)) - held_out
    assert any("central test set" in note for note in summary["notes"])


LATE = ["fleet.late.classes=[3,5]", "fleet.late.devices=2"]


@pytest.fixture(scope="module")
def in_flight(start: Start) -> Run:
    quorum = ["strategy.name=semi-async", "stop.updates=0", "stop.epochs=12"]
    return start(*LATE, "fleet.late.delay=5", *quorum)


def test_late_devices_hold_the_affected_classes(in_flight: Run) -> None:
    folder, summary = in_flight
    counts = Experiment(load_config(folder / "config.toml")).federation.class_counts()
    held = counts[:, [3, 5]].sum(1).tolist()
    late = summary["late_devices"]
    assert len(late) == 2
    assert min(held[d] for d in late) >= max(held[d] for d in range(10) if d not in late)


def test_only_late_devices_hold_the_affected_classes(start: Start) -> None:
    folder, summary = start(*LATE, "fleet.late.delay=5", "fleet.late.only=true")
    experiment = Experiment(load_config(folder / "config.toml"))
    counts = experiment.federation.class_counts()[:, [3, 5]].sum(1)
    assert set(counts.nonzero().flatten().tolist()) == set(summary["late_devices"])
    assert len(summary["late_devices"]) == 2


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("fleet.late.classes=[]", "needs fleet.late.classes"),
        ("fleet.late.devices=0", "needs fleet.late.devices"),
        ("fleet.late.classes=[0,1,2,3,4,5,6,7,8,9]", "must leave others a class"),
        ("data.drift.kind=shift", "by renaming"),
    ],
)
def test_what_only_the_late_cannot_hold(
    tiny: Callable[..., Config], setting: str, reason: str
) -> None:
    with pytest.raises(BadInput, match=rf"fleet\.late\.only = true: .*{reason}"):
        Experiment(tiny(*LATE, "fleet.late.only=true", setting))


def test_late_devices_without_a_delay_are_noted(tiny: Callable[..., Config]) -> None:
    for delay, times in (("0", 1), ("5", 0)):
        found = Experiment(tiny(*LATE, "fleet.late.only=true", f"fleet.late.delay={delay}")).notes
        assert sum("no device is late" in note for note in found) == times


def test_late_runs_measure_the_late(in_flight: Run) -> None:
    folder, summary = in_flight
    assert 0 <= summary["accuracy_affected"] <= 1
    assert float(rows(folder)[-1]["accuracy_affected"]) == summary["accuracy_affected"]
    assert 0 <= summary["client_accuracy"]["late_mean"] <= 1


def test_in_flight_updates_are_stale_by_exactly_the_delay(in_flight: Run) -> None:
    folder, summary = in_flight
    late = set(summary["late_devices"])
    stale = {(line["device"] in late, line["staleness"]) for line in arrivals(folder)}
    assert stale == {(True, 5), (False, 0)}
    # They work in every epoch: an upload in every epoch, five later than it was begun.
    uploads = Counter(line["device"] for line in arrivals(folder))
    assert {uploads[device] for device in late} == {12 - 5}
    assert {uploads[device] for device in range(10) if device not in late} == {12}


def test_busy_devices_come_once_per_delay(start: Start) -> None:
    quorum = ["strategy.name=semi-async", "stop.updates=0", "stop.epochs=30"]
    folder, summary = start(*LATE, "fleet.late.delay=5", "fleet.late.kind=busy", *quorum)
    uploads = Counter(line["device"] for line in arrivals(folder))
    for device in range(10):
        if device in summary["late_devices"]:
            # A task takes its own epoch and five more; the next begins with the next epoch.
            assert uploads[device] == 30 // 6
        else:
            assert uploads[device] == 30


def test_gamma_delays_differ_from_task_to_task(start: Start) -> None:
    quorum = ["strategy.name=semi-async", "stop.updates=0", "stop.epochs=30"]
    folder, summary = start(*LATE, "fleet.late.delay={gamma = 4}", *quorum)
    late = summary["late_devices"]
    stale = [line["staleness"] for line in arrivals(folder) if line["device"] in late]
    assert len(set(stale)) > 3


def test_result_reads_it_back(plain: Run) -> None:
    folder, summary = plain
    found = load(folder)
    assert isinstance(found, Result)
    assert found.summary == summary
    assert found.metrics["updates"].tolist() == [0, 20, 40, 60]
    assert len(found.events) == len(lines(folder))
    assert "seed = 1" in found.config


def test_flatten_joins_nested_scalars() -> None:
    nested = {"a": 1, "bytes": {"up": 2, "down": 3}, "notes": ["x"], "epsilon": None}
    assert flatten(nested) == {"a": 1, "bytes_up": 2, "bytes_down": 3, "epsilon": None}


def test_a_full_disk_is_one_line(
    tiny: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is being written: the model, the summary."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((files, "save_file"), (runner, "write_atomically")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(RunFailed, match="No space left"):
                start_run(tiny("stop.updates=2"), tmp_path / name)


def test_a_run_that_gets_nowhere_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = "fleet.crash=1.0"
    monkeypatch.setattr(runner, "MAX_FAILED_TASKS_PER_DEVICE", 3)
    with pytest.raises(RunFailed, match=r"none of the last \d\d tasks gave an update"):
        start(trouble)
    monkeypatch.setattr(runner, "MAX_FAILED_TASKS_PER_DEVICE", 10**9)
    assert start(trouble, "stop.virtual_seconds=500")[1]["updates"] == 0
    with pytest.raises(
        RunFailed, match=r"no update could be used: .*not finite.*training\.lr = 1e"
    ):
        start("training.lr=1e6", "training.weight_decay=1e6")


def test_the_devices_point_of_view(start: Start) -> None:
    folder, summary = start("data.alpha=0.1")
    for key in ("client_balanced_accuracy", "client_macro_f1"):
        assert 0 <= summary[key]["worst"] <= summary[key]["mean"] <= 1
    assert summary["client_macro_f1"]["mean"] != summary["macro_f1"]
    assert 0 <= summary["worst_client"] < 10
    flat = flatten(summary)
    assert "client_macro_f1_worst" in flat
    assert load(folder).summary["best"] is None  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["fedasync", "semi-async"])
def test_the_number_of_tasks_in_some_virtual_time_is_estimated(
    start: Start, tiny: MakeConfig, strategy: str
) -> None:
    how = ("stop.updates=0", "stop.epochs=0", "fleet.profile=tiers", f"strategy.name={strategy}")
    unit = Experiment(tiny(*how, "stop.virtual_seconds=1")).epoch_seconds
    how = (*how, f"stop.virtual_seconds={20 * unit}")
    _, summary = start(*how)
    planned = Experiment(tiny(*how)).resolution.tasks_in(20 * unit)
    assert summary["updates"] == pytest.approx(planned, rel=0.3)

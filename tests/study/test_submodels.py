"""Runs with sub-models: what devices carry, what it saves, and what stays untouched."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dying import DieAfter, Killed
from latecomer.core.submodel import take
from latecomer.errors import BadInput
from latecomer.study.config import Config, load_config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import resume_run, start_run

MakeConfig = Callable[..., Config]
Run = tuple[Path, dict[str, Any]]
Start = Callable[..., Run]

# 8 x 8 pixels -> 8, 6, 4 or 2 hidden units -> 10 classes.
SIZES = {1.0: 610, 0.75: 460, 0.5: 310, 0.25: 160}
DECLARED = ["submodels.level=declared", "fleet.profile=tiers"]
HALF = ["submodels.level=declared", "submodels.widths=[1.0, 0.5]", "submodels.shares=[0, 1]"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def experiment_of(folder: Path) -> Experiment:
    return Experiment(load_config(folder / "config.toml"))


def models(folder: Path, experiment: Experiment) -> list[Tensor]:
    layout = experiment.model.layout
    return [layout.flatten(load_file(path)) for path in folder.glob("*.safetensors")]


def outside(experiment: Experiment, width: float = 0.5) -> Tensor:
    """A mask of the coordinates that a sub-model does not cover."""
    submodel = experiment.networks.submodels[width]
    assert submodel is not None
    mask = torch.ones(experiment.model.layout.size, dtype=torch.bool)
    mask[submodel.index] = False
    return mask


# Limits


FEW = ["fleet.profile=tiers", "fleet.devices=5", "fleet.late.devices=1", "fleet.late.delay=9"]


@pytest.fixture(scope="module")
def fedasync(start: Start) -> Run:
    weights = ["strategy.decay=reciprocal", "strategy.p=0.3", "strategy.b=1.0"]
    return start(*FEW, "strategy.alpha=0.5", *weights)


@pytest.mark.parametrize(
    "whole",
    [
        ["submodels.level=none"],
        ["submodels.widths=[1.0]", "submodels.shares=[1.0]"],
        ["submodels.level=measured", "submodels.widths=[1.0]"],
        ["submodels.shares=[1, 0, 0, 0]"],
    ],
    ids=["none", "one width", "measured", "all at one level"],
)
def test_on_whole_models_without_noise_it_is_fedasync(
    start: Start, fedasync: Run, whole: list[str]
) -> None:
    ours = ["strategy.name=privaasyncfed", "strategy.beta=0.5", "strategy.a=0.3", "strategy.b=1.0"]
    folder, found = start(*FEW, *ours, *whole, "privacy.epsilon=0.0")
    plain, expected = fedasync
    assert found["model_hash"] == expected["model_hash"]
    assert (folder / "events.jsonl").read_bytes() == (plain / "events.jsonl").read_bytes()
    assert found["bytes"] == expected["bytes"]
    weights = {line["weight"] for line in events(folder, "arrival")}
    assert max(weights) == 0.5
    assert len(weights) > 2  # some were stale enough to count less


def test_narrow_models_are_not_the_limit(start: Start) -> None:
    fleet = [*FEW, "strategy.name=privaasyncfed", "stop.updates=20"]
    found = {start(*fleet, *more)[1]["model_hash"] for more in ([], ["submodels.level=none"])}
    assert len(found) == 2


def test_what_auto_means(tiny: MakeConfig) -> None:
    levels = {
        name: Experiment(tiny(f"strategy.name={name}")).config.submodels.level
        for name in ("privaasyncfed", "heterofl", "dp-fedasync", "fedasync", "centralised")
    }
    assert levels == {
        "privaasyncfed": "declared",
        "heterofl": "declared",
        "dp-fedasync": "none",
        "fedasync": "none",
        "centralised": "none",
    }


def test_one_machine_with_everybody_s_data_is_not_weak(start: Start) -> None:
    name = ["strategy.name=centralised", "stop.updates=3"]
    assert start(*name, *HALF)[1]["model_hash"] == start(*name)[1]["model_hash"]


# What is not covered


ONE_OF_EACH_MERGE = [
    "privaasyncfed",
    "heterofl",
    "fedavg",
    "fedadam",
    "fedbuff",
    "semi-async",
    "feddc",
    "ca2fl",
    "fadas",
    "aso-fed",
    "asyn-tiers",
    "safa",
    "robust-fedbuff",
    "w-pred",
    "clusterfl",
    "standalone",
]
CASES = [
    *((name, 0.0) for name in ONE_OF_EACH_MERGE),
    *((name, 1.0) for name in ("privaasyncfed", "fedavg", "fedbuff")),
]


@pytest.mark.parametrize(("name", "noise"), CASES)
def test_what_nobody_carries_stays_bit_unchanged(start: Start, name: str, noise: float) -> None:
    settings = [f"strategy.name={name}", f"privacy.epsilon={noise}", "fleet.profile=tiers"]
    folder, summary = start(*settings, *HALF, "stop.updates=40")
    experiment = experiment_of(folder)
    untouched, begun = outside(experiment), experiment.model.init(1)
    assert untouched.sum() == SIZES[1.0] - SIZES[0.5]
    found = models(folder, experiment)
    assert found
    for model in found:
        assert torch.equal(model[untouched], begun[untouched])
        assert (model[~untouched] != begun[~untouched]).float().mean() > 0.5  # some units are dead
    assert summary["updates"] == 40


# What it saves


@pytest.fixture(scope="module")
def declared(start: Start) -> Run:
    return start("strategy.name=privaasyncfed", "fleet.profile=tiers")


def test_levels_go_by_the_speed_of_the_hardware(declared: Run) -> None:
    experiment = experiment_of(declared[0])
    groups = [profile.group for profile in experiment.fleet.devices]
    width = {"fast": 1.0, "medium-fast": 0.75, "medium-slow": 0.5, "slow": 0.25}
    assert experiment.levels == [width[group] for group in groups]
    assert sorted(experiment.levels) == [0.25] * 2 + [0.5] * 2 + [0.75] * 3 + [1.0] * 3


@pytest.mark.parametrize("kind", ["dispatch", "arrival"])
def test_bytes_shrink_with_the_model(declared: Run, kind: str) -> None:
    folder, summary = declared
    levels = experiment_of(folder).levels
    lines = events(folder, kind)
    assert {line["device"] for line in lines} == set(range(10))
    for line in lines:
        assert line["bytes"] == 4 * SIZES[levels[line["device"]]]
    way = {"dispatch": "down", "arrival": "up"}[kind]
    assert summary["bytes"][way] == sum(line["bytes"] for line in lines)


def test_time_shrinks_with_the_work(start: Start) -> None:
    """Nothing costs time but examples: 0.01 s each, times the share of the multiplications."""
    work = {1.0: 1.0, 0.75: 6 / 8, 0.5: 4 / 8, 0.25: 2 / 8}  # 64 h + 10 h of h hidden units
    speed = ["fleet.seconds_per_task=0.0", "fleet.seconds_per_example=0.01"]
    folder, _ = start("strategy.name=privaasyncfed", *speed, "training.local_epochs=3")
    experiment = experiment_of(folder)
    assert sorted(set(experiment.levels)) == [0.25, 0.5, 0.75, 1.0]
    sent: dict[int, float] = {}
    for line in sorted(events(folder, "dispatch") + events(folder, "arrival"), key=order):
        device = line["device"]
        if line["event"] == "dispatch":
            sent[line["task"]] = line["time"]
            continue
        passes = 3 * experiment.clients[device].num_examples
        seconds = 0.01 * passes * work[experiment.levels[device]]
        assert line["time"] - sent[line["task"]] == pytest.approx(seconds, rel=1e-4)


def order(line: dict[str, Any]) -> tuple[int, bool]:
    return line["task"], line["event"] == "arrival"


def test_bytes_take_time_too(start: Start) -> None:
    """Links of 1000 bytes/s and nothing else: there and back, 8 bytes per parameter."""
    links = ["fleet.seconds_per_task=0.0", "fleet.up=1000.0", "fleet.down=1000.0"]
    folder, _ = start("strategy.name=privaasyncfed", *links)
    levels = experiment_of(folder).levels
    first = {line["device"]: line["time"] for line in reversed(events(folder, "arrival"))}
    assert len(first) == 10
    for device, seconds in first.items():
        assert seconds == pytest.approx(8 * SIZES[levels[device]] / 1000)


def test_the_fixed_cost_of_a_task_does_not_shrink(start: Start) -> None:
    folder, _ = start("strategy.name=privaasyncfed", "stop.updates=10")
    assert {line["time"] for line in events(folder, "arrival")} == {10.0}


# The models that devices use


def own_accuracies(experiment: Experiment, head: Tensor, units: int) -> list[float]:
    """By hand, with the first hidden units only."""
    layout = experiment.model.layout
    w1, b1, w2, b2 = (layout.unflatten(head)[name] for name in layout.names)
    found = []
    for client in experiment.federation.clients:
        hidden = (client.test.x.flatten(1) @ w1[:units].T + b1[:units]).relu()
        right = (hidden @ w2[:, :units].T + b2).argmax(1) == client.test.y
        found.append(right.float().mean().item())
    return found


def test_a_device_is_measured_with_what_it_carries(start: Start) -> None:
    folder, summary = start("training.lr=0.3", *HALF)
    experiment = experiment_of(folder)
    (head,) = models(folder, experiment)
    narrow, whole = (own_accuracies(experiment, head, units) for units in (4, 8))
    own = summary["client_accuracy"]
    assert own["mean"] == pytest.approx(np.mean(narrow))
    assert own["worst"] == pytest.approx(min(narrow))
    assert narrow != whole
    # The central accuracy is that of the whole model.
    test = experiment.federation.test
    predicted = experiment.model.logits(head, test.x).argmax(1)
    assert summary["accuracy"] == pytest.approx((predicted == test.y).float().mean().item())


def test_devices_of_several_levels_are_measured_each_with_its_own(declared: Run) -> None:
    folder, summary = declared
    experiment = experiment_of(folder)
    (head,) = models(folder, experiment)
    units = [int(8 * width) for width in experiment.levels]
    own = [own_accuracies(experiment, head, n)[device] for device, n in enumerate(units)]
    assert summary["client_accuracy"]["mean"] == pytest.approx(np.mean(own))
    assert summary["client_accuracy"]["worst"] == pytest.approx(min(own))


# Measured levels


@pytest.fixture(scope="module")
def measured(start: Start) -> Run:
    return start("submodels.level=measured", "fleet.profile=tiers", "stop.updates=120")


def test_slow_devices_end_narrower_and_the_log_tells(measured: Run) -> None:
    folder, _ = measured
    speeds = [d.seconds_per_example for d in experiment_of(folder).fleet.devices]
    sizes = {line["device"]: line["bytes"] // 4 for line in events(folder, "dispatch")}
    width = {size: width for width, size in SIZES.items()}
    final = {device: width[size] for device, size in sizes.items()}
    assert {final[d] for d, s in enumerate(speeds) if s == min(speeds)} == {1.0}
    assert all(final[d] < 1.0 for d, s in enumerate(speeds) if s == max(speeds))
    levels = events(folder, "level")
    assert {line["device"] for line in levels} == {d for d in final if final[d] < 1.0}
    told = {line["device"]: line["width"] for line in levels}
    assert told == {device: final[device] for device in told}
    assert {*levels[0]} == {"time", "event", "device", "width", "seconds"}


def test_the_first_task_is_of_the_whole_model(measured: Run) -> None:
    folder, _ = measured
    first = {line["device"]: line["bytes"] for line in reversed(events(folder, "dispatch"))}
    assert set(first.values()) == {4 * SIZES[1.0]}
    # Nobody is called slow before 8 of 10 have been heard.
    heard = [line["time"] for line in events(folder, "arrival")]
    devices = [line["device"] for line in events(folder, "arrival")]
    enough = next(t for i, t in enumerate(heard) if len({*devices[: i + 1]}) == 8)
    assert min(line["time"] for line in events(folder, "level")) == enough


def test_with_more_slack_fewer_are_narrowed(start: Start, measured: Run) -> None:
    loose = ["submodels.level=measured", "submodels.slack=100.0", "fleet.profile=tiers"]
    assert events(start(*loose)[0], "level") == []
    assert events(measured[0], "level")


def test_devices_alike_are_all_alike(start: Start) -> None:
    folder, summary = start("submodels.level=measured")
    assert events(folder, "level") == []
    assert summary["model_hash"] == start()[1]["model_hash"]


# All models


def series(path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    np.savez(path, x=(rng.normal(size=(120, 16, 2)) + y[:, None, None]).astype("float32"), y=y)
    return ["data.source=npz", f'data.path="{path}"', "model.name=cnn1d"]


@pytest.mark.parametrize(
    "name", ["mlp", "lenet", "cnn1d", pytest.param("resnet18", marks=pytest.mark.slow)]
)
def test_every_model_can_be_narrowed(start: Start, tmp_path: Path, name: str) -> None:
    model = series(tmp_path / "series.npz") if name == "cnn1d" else [f"model.name={name}"]
    small = ["data.per_device=4", "evaluate.examples=8", "evaluate.every=100", "fleet.devices=4"]
    shares = ["submodels.shares=[1, 1, 1, 1]", "data.partition=iid", "stop.updates=4"]
    folder, summary = start("strategy.name=privaasyncfed", *model, *small, *shares)
    assert summary["updates"] == 4
    assert summary["refused"] == 0
    experiment = experiment_of(folder)
    sizes = [experiment.networks.models[i].layout.size for i in range(4)]
    assert sizes == sorted(set(sizes), reverse=True)
    sent = {line["device"]: line["bytes"] for line in events(folder, "arrival")}
    assert sorted(sent.values(), reverse=True) == [4 * size for size in sizes]
    assert np.isfinite(summary["loss"])


NETS = """
from torch import nn

def wide(input_shape, num_classes, width=1.0):
    hidden = max(1, int(8 * width))
    first = nn.Linear(64, hidden)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(hidden, num_classes))

def fixed(input_shape, num_classes):
    return wide(input_shape, num_classes)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("nets")
def test_a_user_s_model_with_a_width(start: Start) -> None:
    folder, _ = start("strategy.name=privaasyncfed", "model.name=sub_nets:wide", "stop.updates=20")
    assert {line["bytes"] for line in events(folder, "arrival")} == {4 * n for n in SIZES.values()}


@pytest.mark.usefixtures("nets")
def test_a_user_s_model_without_a_width(start: Start, tiny: MakeConfig) -> None:
    name = ["strategy.name=privaasyncfed", "model.name=sub_nets:fixed"]
    with pytest.raises(BadInput) as refused:
        Experiment(tiny(*name))
    for words in ("submodels.widths", "'sub_nets:fixed'", "takes width=", "submodels.level"):
        assert words in str(refused.value)
    _, summary = start(*name, "submodels.level=none", "stop.updates=10")
    assert summary["updates"] == 10
    _, summary = start("strategy.name=fedasync", name[1], "stop.updates=10")
    assert summary["updates"] == 10


@pytest.mark.parametrize("kernel", ["plain", "compiled"])
def test_however_it_is_computed_it_is_the_same_model(
    start: Start, declared: Run, kernel: str
) -> None:
    name = ["strategy.name=privaasyncfed", "fleet.profile=tiers"]
    folder, summary = start(*name, f"engine.kernel={kernel}")
    assert load_config(declared[0] / "config.toml").engine.kernel == "batched"
    (one,), (two,) = (models(f, experiment_of(f)) for f in (folder, declared[0]))
    assert torch.allclose(one, two, atol=1e-4)
    assert summary["updates"] == 60


# Repair of late updates, through the network that the device trained


def test_feddc_repairs_through_narrow_networks(start: Start) -> None:
    late = ["fleet.late.classes=[5]", "fleet.late.devices=3", "fleet.late.delay=3"]
    effort = ["strategy.name=feddc", "strategy.iterations=5", "strategy.samples=4"]
    folder, summary = start(*effort, *late, *HALF, "strategy.gate=off", "stop.updates=100")
    assert summary["compensation"]["count"] > 0
    repaired = [line for line in events(folder, "compensation") if line["gamma"] > 0]
    assert len(repaired) == summary["compensation"]["count"]
    assert all(0 < line["fit"] < 1 for line in repaired)
    assert {line["bytes"] for line in events(folder, "arrival")} == {4 * SIZES[0.5]}
    experiment = experiment_of(folder)
    untouched, (model,) = outside(experiment), models(folder, experiment)
    assert torch.equal(model[untouched], experiment.model.init(1)[untouched])


def test_feddc_repairs_devices_of_all_levels(start: Start) -> None:
    late = ["fleet.late.devices=10", "fleet.late.delay={gamma = 2}", "fleet.profile=tiers"]
    effort = ["strategy.name=feddc", "strategy.iterations=3", "strategy.samples=4"]
    level = ["submodels.level=declared", "strategy.gate=off"]
    folder, summary = start(*effort, *late, *level, "stop.updates=100")
    levels = experiment_of(folder).levels
    repaired = {levels[line["device"]] for line in events(folder, "compensation")}
    assert len(repaired) > 2
    assert summary["compensation"]["count"] > 0
    assert np.isfinite(summary["loss"])


# Interrupted and resumed


# tests/test_conformance.py resumes every strategy with sub-models, on a toy problem.
@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("privaasyncfed", "declared"),
        ("feddc", "measured"),
        pytest.param("privaasyncfed", "measured", marks=pytest.mark.slow),
        pytest.param("heterofl", "measured", marks=pytest.mark.slow),
        pytest.param("ca2fl", "declared", marks=pytest.mark.slow),
        pytest.param("clusterfl", "declared", marks=pytest.mark.slow),
        pytest.param("paflm", "measured", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_it_is_the_same_run(
    tiny: MakeConfig, tmp_path: Path, name: str, level: str
) -> None:
    quick = ["strategy.iterations=3", "strategy.samples=4"] if name == "feddc" else []
    config = tiny(
        f"strategy.name={name}",
        *quick,
        f"submodels.level={level}",
        "fleet.profile=tiers",
        "checkpoint.every=7",
        "stop.updates=50",
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = start_run(config, whole)
    with pytest.raises(Killed):
        start_run(config, cut, DieAfter(24))
    found = resume_run(cut)
    assert found["model_hash"] == expected["model_hash"]
    assert found["client_accuracy"] == expected["client_accuracy"]
    assert (cut / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    sizes = {line["bytes"] for line in events(whole, "dispatch")}
    assert len(sizes) > 1


def test_the_level_of_a_run_is_in_its_config(declared: Run) -> None:
    config = load_config(declared[0] / "config.toml")
    assert config.submodels.level == "declared"
    assert config.submodels.widths == (1.0, 0.75, 0.5, 0.25)
    whole = experiment_of(declared[0]).networks
    for width, size in SIZES.items():
        assert take(whole.whole.init(0), whole.submodels[width]).numel() == size

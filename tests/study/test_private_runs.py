"""Runs under local differential privacy: ledgers, budgets, and strategies that are refused."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dying import DieAfter, Killed
from latecomer.device.ledger import Release, composed_epsilon
from latecomer.device.privacy import per_release_multiplier
from latecomer.errors import BadInput
from latecomer.study.config import Config, load_config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import resume_run, start_run

MakeConfig = Callable[..., Config]
Run = tuple[Path, dict[str, Any]]
Start = Callable[..., Run]

NOMINAL = Release("gaussian", per_release_multiplier(1.0, 1e-5))
PRIVATE = ["privacy.epsilon=1.0"]
# One release per task: a device may do 4, and not 5.
FOUR = [*PRIVATE, "privacy.where=update", "privacy.budget=1.7"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def epsilon(releases: int, release: Release = NOMINAL, delta: float = 1e-5) -> float:
    return composed_epsilon(((release, releases),), delta, "pld")


def last_of_each(folder: Path) -> dict[int, float]:
    return {line["device"]: line["epsilon"] for line in events(folder, "arrival")}


def test_four_tasks_are_what_this_budget_affords() -> None:
    assert epsilon(4) < 1.7 < epsilon(5)


# The ledger in events and summary


@pytest.fixture(scope="module")
def private(start: Start) -> Run:
    return start("strategy.name=privaasyncfed", "fleet.profile=tiers", *PRIVATE)


def test_arrivals_have_the_epsilon_of_their_device(private: Run) -> None:
    folder, summary = private
    released: Counter[int] = Counter()
    for line in events(folder, "arrival"):
        released[line["device"]] += 1  # one pass over the data
        assert line["epsilon"] == epsilon(released[line["device"]])
    assert len(set(released.values())) > 2  # fast devices release more often
    values = [epsilon(count) for count in released.values()]
    assert summary["epsilon"] == {
        "mean": pytest.approx(sum(values) / 10),
        "max": max(values),
        "retired": 0,
    }
    assert summary["ended_by"] == "updates"


def test_it_is_another_model_than_without(private: Run, start: Start) -> None:
    _, open_ = start("strategy.name=privaasyncfed", "fleet.profile=tiers")
    assert open_["model_hash"] != private[1]["model_hash"]
    assert open_["epsilon"] is None
    assert open_["bytes"] == private[1]["bytes"]
    assert "no noise is added" in " ".join(open_["notes"])
    assert not any("no noise" in note for note in private[1]["notes"])


@pytest.mark.parametrize(("accountant", "expected"), [("pld", 5.98), ("rdp", 6.44)])
def test_forty_releases_of_a_nominal_epsilon_of_one(
    start: Start, accountant: str, expected: float
) -> None:
    """What the paper's calibration truly spends."""
    where = ["privacy.where=update", f"privacy.accountant={accountant}"]
    _, summary = start(*PRIVATE, *where, "fleet.devices=2", "stop.updates=80")
    assert summary["epsilon"]["mean"] == pytest.approx(expected, abs=0.005)
    assert summary["epsilon"]["max"] == pytest.approx(expected, abs=0.005)


def test_every_pass_over_the_data_is_a_release(start: Start) -> None:
    passes = ["training.local_epochs=3", "stop.updates=20"]
    assert start(*PRIVATE, *passes)[1]["epsilon"]["max"] == epsilon(6)
    whole = start(*PRIVATE, *passes, "privacy.where=update")
    assert whole[1]["epsilon"]["max"] == epsilon(2)


def test_sampled_steps_are_releases_of_their_own(start: Start) -> None:
    folder, summary = start(*PRIVATE, "privacy.sampling=poisson", "stop.updates=20")
    clients = Experiment(load_config(folder / "config.toml")).clients
    expected = {
        device: epsilon(
            2 * -(-c.num_examples // 32),
            Release("gaussian", NOMINAL.multiplier, 32 / c.num_examples),
        )
        for device, c in clients.items()
    }
    assert last_of_each(folder) == expected
    assert summary["epsilon"]["max"] == max(expected.values()) < epsilon(2)


def test_less_noise_learns_more(start: Start) -> None:
    name = ["strategy.name=dp-fedasync", "data.partition=iid", "training.lr=0.3"]
    hidden, told = (
        start(*name, f"privacy.epsilon={value}", "stop.updates=100")[1]["accuracy"]
        for value in (0.01, 1000.0)
    )
    assert hidden < 0.3
    assert told > 0.6


def test_what_was_refused_was_released_all_the_same(start: Start) -> None:
    """The checks refuse most updates and end the run; the devices have spent it nevertheless."""
    strict = ["server.norm_ratio=0.3", "stop.updates=30"]
    folder, summary = start(*PRIVATE, *strict)
    assert (summary["updates"], summary["refused"], summary["rollbacks"]) == (10, 30, 4)
    answers = [*events(folder, "arrival"), *events(folder, "refusal")]
    most = max(Counter(line["device"] for line in answers).values())
    assert summary["epsilon"]["max"] == epsilon(most)


# Budgets


@pytest.fixture(scope="module")
def exhausted(start: Start) -> Run:
    return start(*FOUR, "fleet.profile=tiers")


def test_a_run_whose_budgets_are_spent_ends_with_that_reason(exhausted: Run) -> None:
    folder, summary = exhausted
    assert summary["ended_by"] == "all devices have spent their privacy budgets"
    assert summary["updates"] == 40
    assert summary["epsilon"] == {
        "mean": pytest.approx(epsilon(4)),
        "max": epsilon(4),
        "retired": 10,
    }
    assert set(Counter(line["device"] for line in events(folder, "arrival")).values()) == {4}


def test_a_retire_event_has_its_reason(exhausted: Run) -> None:
    folder, _ = exhausted
    retired = events(folder, "retire")
    assert sorted(line["device"] for line in retired) == list(range(10))
    for line in retired:
        assert line["reason"] == "its next release would exceed its privacy budget"
        assert line["epsilon"] == epsilon(4)
        later = [e for e in events(folder, "dispatch") if e["device"] == line["device"]]
        assert max(e["time"] for e in later) < line["time"]


@pytest.mark.parametrize(
    "name",
    ["fedavg", "fedbuff", "semi-async", "feddc", "asyn-tiers", "safa", "fedsea", "clusterfl"],
)
def test_every_kind_of_strategy_ends_when_no_device_is_left(start: Start, name: str) -> None:
    folder, summary = start(f"strategy.name={name}", *FOUR, "fleet.profile=tiers")
    assert summary["ended_by"] == "all devices have spent their privacy budgets"
    assert summary["epsilon"]["retired"] == len(events(folder, "retire")) == 10
    assert summary["epsilon"]["max"] == epsilon(4)


def test_a_device_without_budget_gets_one_task(start: Start) -> None:
    folder, summary = start(*PRIVATE, "privacy.budget=0.5")
    assert summary["epsilon"] == {"mean": 0.0, "max": 0.0, "retired": 10}
    assert summary["versions"] == 0
    assert len(events(folder, "dispatch")) == 10
    assert all(line["skipped"] for line in events(folder, "arrival"))
    assert summary["ended_by"] == "all devices have spent their privacy budgets"


def test_some_may_retire_before_others(start: Start) -> None:
    """The devices that vanish for good are not those whose budget is spent."""
    _, summary = start(*FOUR, "fleet.dropout=0.1", "stop.updates=100")
    retired = summary["epsilon"]["retired"]
    assert 0 < retired < 10
    assert f"{retired} of 10 devices have spent their privacy budgets" in summary["ended_by"]


@pytest.mark.parametrize("name", ["fedasync", "semi-async"])
def test_a_pipeline_of_open_tasks_keeps_to_the_budget(start: Start, name: str) -> None:
    """Late devices go on working while uploads are under way, which overtake each other."""
    late = ["fleet.late.devices=4", "fleet.late.delay={gamma = 6}", f"strategy.name={name}"]
    folder, summary = start(*FOUR, *late, "fleet.profile=tiers", "stop.updates=200")
    sent = Counter(e["device"] for e in events(folder, "arrival") if "skipped" not in e)
    silent = Counter(e["device"] for e in events(folder, "arrival") if "skipped" in e)
    assert set(sent.values()) == {4}
    assert silent
    assert set(silent) <= set(summary["late_devices"])
    told = [e["epsilon"] for e in events(folder, "arrival")]
    assert max(told) == epsilon(4) == summary["epsilon"]["max"]
    if name == "fedasync":  # an upload that was overtaken told less; the summary is not fooled
        assert any(value < epsilon(4) for value in last_of_each(folder).values())
    assert summary["epsilon"]["mean"] == pytest.approx(epsilon(4))
    assert summary["epsilon"]["retired"] == 10


# For the whole run


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["privacy.where=update"],
        ["privacy.sampling=poisson"],
        ["privacy.noise=laplace"],
        ["privacy.accountant=rdp", "privacy.delta=1e-3"],
        ["privacy.denominator=dataset"],
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_a_whole_run_spends_at_most_its_target(start: Start, more: list[str]) -> None:
    target = ["privacy.epsilon=2.0", "privacy.mode=whole-run", "training.local_epochs=2"]
    folder, summary = start(*target, *more, "fleet.profile=tiers", "stop.updates=50")
    assert load_config(folder / "config.toml").privacy.tasks == 5
    assert 1.98 < summary["epsilon"]["max"] <= 2.0
    # Who was fast enough to do its 5 tasks does no more.
    done = Counter(line["device"] for line in events(folder, "arrival"))
    assert max(done.values()) == 5
    assert summary["epsilon"]["retired"] == sum(count == 5 for count in done.values()) > 0


@pytest.mark.parametrize(
    ("stop", "tasks"),
    [
        (["stop.updates=61"], 7),  # of 10 devices
        (["stop.updates=0", "stop.epochs=4"], 4),
        (["stop.updates=0", "stop.virtual_seconds=95.0"], 10),  # of 10 s each
        (["stop.updates=61", "stop.epochs=4"], 4),
        (["stop.updates=3", "privacy.tasks=9"], 9),
        (["stop.updates=3"], 1),
    ],
)
def test_how_many_tasks_are_planned(tiny: MakeConfig, stop: list[str], tasks: int) -> None:
    whole = ["privacy.epsilon=1.0", "privacy.mode=whole-run"]
    config = Experiment(tiny(*whole, *stop)).config
    assert config.privacy.tasks == tasks


def test_more_tasks_need_more_noise(tiny: MakeConfig) -> None:
    whole = ["privacy.epsilon=1.0", "privacy.mode=whole-run"]
    found = [Experiment(tiny(*whole, f"privacy.tasks={n}")).privacy(50) for n in (1, 4, 16)]
    multipliers = [privacy.multiplier for privacy in found if privacy]
    assert [m / multipliers[0] for m in multipliers] == pytest.approx([1, 2, 4], rel=1e-3)
    assert {privacy.budget for privacy in found if privacy} == {1.0}
    stingy = Experiment(tiny(*whole, "privacy.budget=0.5")).privacy(50)
    assert stingy is not None
    assert stingy.budget == 0.5


# Who takes part


@pytest.mark.parametrize("name", ["feddc", "fedbuff", "paflm", "aso-fed", "heterofl", "standalone"])
def test_strategies_of_all_kinds_run_under_privacy(start: Start, name: str) -> None:
    settings = [f"strategy.name={name}", "stop.updates=40"]
    folder, summary = start(*settings, *PRIVATE)
    assert summary["updates"] == 40
    assert summary["refused"] == 0
    assert summary["loss"] < 10
    assert all("epsilon" in line for line in events(folder, "arrival"))
    assert summary["epsilon"]["max"] == epsilon(4)
    assert start(*settings)[1]["model_hash"] != summary["model_hash"]


def test_feddc_compensates_noised_updates(start: Start) -> None:
    late = ["fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay=3"]
    _, summary = start(
        "strategy.name=feddc",
        "strategy.iterations=5",
        "strategy.samples=4",
        *late,
        "privacy.epsilon=100.0",
        "stop.updates=80",
    )
    assert summary["compensation"]["count"] > 0
    assert summary["epsilon"]["max"] > 0


def test_a_suppressed_update_is_charged(start: Start) -> None:
    """A device that has nothing new to say has looked at its data all the same."""
    folder, summary = start("strategy.name=paflm", "strategy.threshold=1e6", *PRIVATE)
    arrivals = events(folder, "arrival")
    assert any("skipped" in line for line in arrivals)
    assert all("epsilon" in line for line in arrivals)
    assert summary["epsilon"]["max"] == epsilon(6)


@pytest.mark.parametrize(
    "strategy", [["strategy.name=oort"], ["strategy.name=fedavg", "strategy.select=oort"]]
)
def test_oort_notes_that_no_loss_is_reported(start: Start, strategy: list[str]) -> None:
    _, summary = start(*strategy, *PRIVATE, "stop.updates=20")
    (note,) = (note for note in summary["notes"] if "loss" in note)
    assert "not covered by their privacy ledger and is not sent" in note
    assert not any("ledger" in note for note in start(*strategy, "stop.updates=5")[1]["notes"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["strategy.name=ifca"], "'ifca' needs devices to report which model fits"),
        (["strategy.name=centralised"], "'centralised' pools all data on one machine"),
        (["training.clip=1.0"], r"training\.clip = 1: with privacy\.epsilon the bound is privacy"),
    ],
)
def test_what_cannot_be_private_is_refused(
    tiny: MakeConfig, settings: list[str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        Experiment(tiny(*settings, *PRIVATE))
    Experiment(tiny(*settings))


def test_a_clip_of_single_examples_goes_with_noise_on_the_update(start: Start) -> None:
    where = [*PRIVATE, "privacy.where=update", "stop.updates=20"]
    clipped = start(*where, "training.clip=0.01")[1]
    assert clipped["model_hash"] != start(*where)[1]["model_hash"]


def test_the_server_trains_as_its_devices_do(tiny: MakeConfig) -> None:
    """What `feddc` unrolls has the bound of the device in it."""
    spec = Experiment(tiny(*PRIVATE, "privacy.clip=0.7")).spec
    assert (spec.clip, spec.clip_norm) == (0.7, 2)
    laplace = Experiment(tiny(*PRIVATE, "privacy.noise=laplace")).spec
    assert (laplace.clip, laplace.clip_norm) == (1.0, 1)
    assert Experiment(tiny(*PRIVATE, "privacy.where=update")).spec.clip == 0.0


# Interrupted and resumed


RESUMED = {
    "privaasyncfed": ["strategy.name=privaasyncfed", "fleet.profile=tiers"],
    "pipeline": ["fleet.late.devices=4", "fleet.late.delay={gamma = 6}"],
    "buffer": ["strategy.name=fedbuff", "fleet.profile=tiers", "fleet.crash=0.1"],
    "memory": ["strategy.name=paflm", "fleet.profile=tiers"],
    "average": ["strategy.name=latecomer", "fleet.profile=tiers"],
    "whole run": ["privacy.mode=whole-run", "privacy.budget=0.9", "stop.updates=40"],
}


@pytest.mark.parametrize("kind", RESUMED)
def test_killed_and_resumed_it_spends_the_same(tiny: MakeConfig, tmp_path: Path, kind: str) -> None:
    config = tiny(*FOUR, "checkpoint.every=7", "evaluate.every=9", *RESUMED[kind])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start_run(config, whole)
    for updates, go in (
        (12, lambda p: start_run(config, cut, p)),
        (26, lambda p: resume_run(cut, p)),
    ):
        with pytest.raises(Killed):
            go(DieAfter(updates))
        assert (cut / "checkpoint" / "latest").is_file()
    resume_run(cut)
    assert (cut / "events.jsonl").read_bytes() == (whole / "events.jsonl").read_bytes()
    assert last_of_each(cut) == last_of_each(whole)
    one, other = (json.loads((f / "summary.json").read_text()) for f in (whole, cut))
    assert one.pop("wall_seconds") >= 0
    assert other.pop("wall_seconds") >= 0
    assert one == other
    assert one["epsilon"]["max"] > 0
    tables = [pd.read_csv(f / "metrics.csv").drop(columns="wall_seconds") for f in (whole, cut)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_budget_without_noise_is_refused(start: Start) -> None:
    """Else somebody would believe in a protection that is not there."""
    with pytest.raises(BadInput, match="privacy is switched off"):
        start("privacy.budget=3.0")

"""Advice: facts about a scenario without training, and about a run from its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latecomer.errors import BadInput
from latecomer.study.advice.advice import subject
from latecomer.study.advice.dry_run import dry_run, loads_of
from latecomer.study.advice.facts import Scenario
from latecomer.study.advice.measured import comparison_results, measured
from latecomer.study.advice.scenario import label_skew, offline_share, profile
from latecomer.study.compare import compare
from latecomer.study.config import Config, Tree
from latecomer.study.experiment import Experiment
from latecomer.study.results import Comparison, Result

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]

LATE = ("fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay=6", "data.alpha=0.05")


@pytest.fixture(scope="module")
def facts(tiny: MakeConfig) -> Callable[..., Scenario]:
    return lambda *settings: profile(Experiment(tiny(*settings)))


def test_equal_devices_have_no_skew_and_single_classes_all_of_it() -> None:
    alike = np.full((20, 4), 250)
    assert label_skew(alike) == 0.0
    alone = np.kron(np.eye(4, dtype=int), np.full((5, 1), 1000))
    assert label_skew(alone) == pytest.approx(1.0, abs=0.01)
    # Few examples differ by chance, which is no skew.
    drawn = np.random.default_rng(3).multinomial(11, [0.1] * 10, size=200)
    assert label_skew(drawn) < 0.03
    assert 0.3 < label_skew((alike + alone) // 2) < 0.6


def test_a_dry_run_has_the_times_of_the_fleet(tiny: MakeConfig) -> None:
    experiment = Experiment(tiny("fleet.profile=tiers", "stop.updates=50"))
    found = dry_run(experiment)
    assert len(found.device) == 50
    size = 4 * experiment.model.layout.size
    loads = loads_of(experiment)
    for device in range(10):
        profile, own = experiment.fleet.devices[device], found.device == device
        takes = profile.download_seconds(size) + profile.upload_seconds(size)
        takes += profile.compute_seconds(loads[device].passes)
        assert (found.arrived - found.sent)[own] == pytest.approx(takes)


def test_a_dry_run_ends_at_its_bound(tiny: MakeConfig) -> None:
    experiment = Experiment(tiny())
    assert len(dry_run(experiment, max_updates=7).device) == 7


def test_narrow_devices_have_less_to_do(tiny: MakeConfig) -> None:
    loads = loads_of(Experiment(tiny("submodels.level=declared", "fleet.profile=tiers")))
    wide, slim = max(loads, key=lambda load: load.size), min(loads, key=lambda load: load.size)
    assert slim.size < wide.size
    assert slim.passes < wide.passes


def test_no_device_is_late_on_a_uniform_fleet(facts: Callable[..., Scenario]) -> None:
    found = facts()
    assert (found.devices, found.late, found.stragglers, found.straggler_classes) == (10, 0, 0, {})
    assert found.speed_ratio == 1.0
    assert found.age == pytest.approx(1.0)
    assert found.epochs == pytest.approx(6.0)
    assert found.budget is None


def test_late_devices_are_found_with_what_they_hold(facts: Callable[..., Scenario]) -> None:
    found = facts(*LATE, "stop.updates=200")
    assert (found.late, found.stragglers, found.busy) == (2, 2, False)
    assert found.straggler_age == pytest.approx(6.5)
    assert found.straggler_classes["5"] > 0.8
    assert 0.2 < found.first_update_after < 0.5
    assert facts(*LATE, 'fleet.late.kind="busy"').busy


def test_devices_without_updates_do_not_hide_late_devices(facts: Callable[..., Scenario]) -> None:
    """Many phones are online at night only and send no update in a short run."""
    found = facts(*LATE, "fleet.profile=phones", "fleet.late.only=true")
    assert found.without_update > 0
    assert (found.late, found.stragglers) == (2, 2)
    assert found.straggler_classes["5"] == 1.0


def test_concept_shift_is_found(facts: Callable[..., Scenario]) -> None:
    assert facts("data.drift.kind=shift").concept_shift
    assert not facts("data.drift.kind=grow").concept_shift


def test_a_budget_is_computed_by_the_accountant(facts: Callable[..., Scenario]) -> None:
    private = ("privacy.epsilon=1.0", "stop.updates=400", "data.scale=none")
    budget = facts(*private).budget
    assert budget is not None
    assert budget.tasks_mean == pytest.approx(40)
    assert budget.spent_mean == pytest.approx(5.98, abs=0.01)  # docs/privacy.md


def test_time_outside_windows_is_offline() -> None:
    assert offline_share((), 24.0) == 0.0
    assert offline_share(((0.0, 6.0), (20.0, 22.0)), 24.0) == pytest.approx(2 / 3)


def test_facts_of_a_run(start: Start) -> None:
    folder, summary = start(*LATE, "stop.updates=120")
    run = measured(Result(folder))
    assert run.strategy == "fedasync"
    assert run.staleness == summary["staleness"]["mean"]
    assert run.local_late == pytest.approx(summary["client_accuracy"]["late_mean"])
    assert run.late_are == "Late devices"
    assert run.idle < 0.1


def test_idle_time_is_found(start: Start) -> None:
    folder, _ = start("strategy.name=fedavg", "fleet.profile=tiers")
    assert measured(Result(folder)).idle > 0.3


def test_devices_with_few_updates_are_a_group_without_late_ones(start: Start) -> None:
    folder, summary = start("fleet.profile=tiers", "stop.updates=120", "fleet.devices=20")
    run = measured(Result(folder))
    assert run.late_are == "Devices with few updates"
    assert run.local_late is not None
    assert run.local_others is not None
    mean = 0.2 * run.local_late + 0.8 * run.local_others
    assert mean == pytest.approx(summary["client_accuracy"]["mean"], abs=0.02)


@pytest.mark.parametrize(("lr", "too_small"), [(0.0001, True), (30.0, False)])
def test_a_wrong_rate_is_found_in_the_files(start: Start, lr: float, too_small: bool) -> None:
    folder, _ = start("data.partition=iid", f"training.lr={lr}", "stop.updates=150")
    found = measured(Result(folder)).rate
    assert found is not None
    assert found.too_small is too_small
    assert (found.lr > lr) is too_small


def test_a_run_without_its_data_is_analysed_from_its_files(start: Start) -> None:
    folder, _ = start()
    text = (folder / "config.toml").read_text().replace('source = "digits"', 'source = "npz"')
    (folder / "config.toml").write_text(text)
    found = subject(folder)
    assert found.facts.scenario is None
    assert found.facts.run is not None
    assert "files only" in found.notes[0]


def test_an_unfinished_run_is_refused(start: Start) -> None:
    folder, _ = start()
    (folder / "summary.json").unlink()
    with pytest.raises(BadInput, match="not finished"):
        subject(folder)


def test_a_reference_is_analysed_as_a_fleet(tmp_path: Path) -> None:
    config = tmp_path / "mark.toml"
    config.write_text(
        "[fleet]\ndevices = 10\n[fleet.late]\nclasses = [5]\ndevices = 2\ndelay = 6\n"
        '[stop]\nupdates = 100\n[strategy]\nname = "unstale"\n'
    )
    found = subject(config)
    assert found.facts.scenario is not None
    assert found.facts.scenario.straggler_age > 5
    assert "unstale" in found.notes[0]


def test_the_strategies_of_a_comparison_are_ranked_by_accuracy(
    tiny_tree: Tree, tmp_path: Path
) -> None:
    compare(tiny_tree, ["fedasync", "standalone"], [1, 2], tmp_path / "both")
    found, run = comparison_results(Comparison(tmp_path / "both"))
    assert [each.strategy for each in found] == ["fedasync", "standalone"]
    assert found[0].accuracy > found[1].accuracy
    assert found[0].seeds == 2
    assert run.summary["strategy"] == "fedasync"
    assert subject(tmp_path / "both").facts.comparison == found


def test_references_do_not_count_in_a_comparison(tiny_tree: Tree, tmp_path: Path) -> None:
    compare(tiny_tree, ["centralised", "fedasync"], [1], tmp_path / "both")
    found, _ = comparison_results(Comparison(tmp_path / "both"))
    assert [each.strategy for each in found] == ["fedasync"]


def test_a_fleet_that_loses_everything_or_takes_no_time(facts: Callable[..., Scenario]) -> None:
    hopeless = facts("fleet.crash=1.0")
    assert (hopeless.without_update, hopeless.lost) == (1.0, 1.0)
    timeless = facts("fleet.seconds_per_task=0")
    assert (timeless.age, timeless.epochs, timeless.speed_ratio) == (0.0, 0.0, 1.0)

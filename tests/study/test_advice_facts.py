"""Advice: facts about a scenario without training, and about a run from its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latecomer.errors import BadInput
from latecomer.study.advice.facts import Scenario
from latecomer.study.advice.measured import contest, measured
from latecomer.study.advice.rehearsal import Arrivals, loads_of, rehearse
from latecomer.study.advice.scenario import away_share, label_skew, profile
from latecomer.study.advice.subject import subject
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


def test_a_rehearsal_has_the_fleets_own_times(tiny: MakeConfig) -> None:
    experiment = Experiment(tiny("fleet.profile=tiers", "stop.updates=50"))
    found = rehearse(experiment)
    assert len(found.device) == 50
    size = 4 * experiment.model.layout.size
    loads = loads_of(experiment)
    for device in range(10):
        profile, mine = experiment.fleet.devices[device], found.device == device
        takes = profile.download_seconds(size) + profile.upload_seconds(size)
        takes += profile.compute_seconds(loads[device].passes)
        assert (found.came - found.sent)[mine] == pytest.approx(takes)


def test_a_rehearsal_ends_where_it_is_told(tiny: MakeConfig) -> None:
    experiment = Experiment(tiny())
    assert len(rehearse(experiment, most=7).device) == 7


def test_narrow_devices_have_less_to_do(tiny: MakeConfig) -> None:
    loads = loads_of(Experiment(tiny("submodels.level=declared", "fleet.profile=tiers")))
    wide, slim = max(loads, key=lambda load: load.width), min(loads, key=lambda load: load.width)
    assert slim.size < wide.size
    assert slim.passes < wide.passes


def test_updates_that_come_meanwhile_are_counted() -> None:
    at = Arrivals(np.array([0, 1, 0]), np.array([0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0]), 0, 3.0)
    assert at.meanwhile().tolist() == [0.0, 1.0, 1.0]


def test_nobody_is_late_on_a_uniform_fleet(facts: Callable[..., Scenario]) -> None:
    found = facts()
    assert (found.devices, found.late, found.behind, found.tied) == (10, 0, 0, {})
    assert found.speed_ratio == 1.0
    assert found.age == pytest.approx(1.0)
    assert found.epochs == pytest.approx(6.0)
    assert found.budget is None


def test_late_devices_are_found_with_what_they_hold(facts: Callable[..., Scenario]) -> None:
    found = facts(*LATE, "stop.updates=200")
    assert (found.late, found.behind, found.busy) == (2, 2, False)
    assert found.age_behind == pytest.approx(6.5)
    assert found.tied["5"] > 0.8
    assert 0.2 < found.heard_after < 0.5
    assert facts(*LATE, 'fleet.late.kind="busy"').busy


def test_who_is_never_heard_does_not_hide_the_late(facts: Callable[..., Scenario]) -> None:
    """Many phones are reachable at night only, and are not heard in so short a run."""
    found = facts(*LATE, "fleet.profile=phones", "fleet.late.only=true")
    assert found.unheard > 0
    assert (found.late, found.behind) == (2, 2)
    assert found.tied["5"] == 1.0


def test_a_drift_that_contradicts_is_seen(facts: Callable[..., Scenario]) -> None:
    assert facts("data.drift.kind=shift").contradicts
    assert not facts("data.drift.kind=grow").contradicts


def test_a_budget_is_reckoned_by_the_accountant(facts: Callable[..., Scenario]) -> None:
    private = ("privacy.epsilon=1.0", "stop.updates=400", "data.scale=none")
    budget = facts(*private).budget
    assert budget is not None
    assert budget.planned_mean == pytest.approx(40)
    assert budget.spent_mean == pytest.approx(5.98, abs=0.01)  # docs/privacy.md
    limited = facts(*private, "privacy.budget=2.69").budget
    assert limited is not None
    assert 9 <= limited.allowed <= 10  # the same table


def test_windows_are_time_away() -> None:
    assert away_share((), 24.0) == 0.0
    assert away_share(((0.0, 6.0), (20.0, 22.0)), 24.0) == pytest.approx(2 / 3)


def test_a_run_tells_of_itself(start: Start) -> None:
    folder, summary = start(*LATE, "stop.updates=120")
    run = measured(Result(folder))
    assert run.strategy == "fedasync"
    assert run.staleness_mean == summary["staleness"]["mean"]
    assert run.staleness_most <= run.staleness_max
    assert run.own_late == pytest.approx(summary["client_accuracy"]["late_mean"])
    assert run.waiting < 0.1
    assert run.late_updates is not None
    assert run.late_weight is not None
    assert run.late_weight < run.late_updates  # fedasync discounts them
    assert run.repairs is None
    assert run.clusters is None


def test_waiting_and_repair_are_seen(start: Start) -> None:
    folder, _ = start("strategy.name=fedavg", "fleet.profile=tiers")
    assert measured(Result(folder)).waiting > 0.3
    folder, summary = start("strategy.name=feddc", *LATE, "stop.updates=0", "stop.epochs=12")
    assert measured(Result(folder)).repairs == summary["compensation"]["count"]


def test_a_run_whose_data_are_gone_is_judged_by_its_files(start: Start) -> None:
    folder, _ = start()
    text = (folder / "config.toml").read_text().replace('source = "digits"', 'source = "npz"')
    (folder / "config.toml").write_text(text)
    found = subject(folder)
    assert found.facts.scenario is None
    assert found.facts.run is not None
    assert "files alone" in found.notes[0]


def test_an_unfinished_run_is_refused(start: Start) -> None:
    folder, _ = start()
    (folder / "summary.json").unlink()
    with pytest.raises(BadInput, match="not finished"):
        subject(folder)


def test_a_reference_is_looked_at_as_a_fleet(tmp_path: Path) -> None:
    config = tmp_path / "mark.toml"
    config.write_text(
        "[fleet]\ndevices = 10\n[fleet.late]\nclasses = [5]\ndevices = 2\ndelay = 6\n"
        '[stop]\nupdates = 100\n[strategy]\nname = "unstale"\n'
    )
    found = subject(config)
    assert found.facts.scenario is not None
    assert found.facts.scenario.age_behind > 5
    assert "unstale" in found.notes[0]


def test_the_winner_of_a_comparison_is_named(tiny_tree: Tree, tmp_path: Path) -> None:
    compare(tiny_tree, ["fedasync", "standalone"], [1, 2], tmp_path / "both")
    found, run = contest(Comparison(tmp_path / "both"))
    assert (found.winner, found.second, found.seeds) == ("fedasync", "standalone", 2)
    assert found.margin > 0
    assert run.summary["strategy"] == "fedasync"
    assert subject(tmp_path / "both").facts.contest == found


def test_references_win_no_comparison(tiny_tree: Tree, tmp_path: Path) -> None:
    compare(tiny_tree, ["centralised", "fedasync"], [1], tmp_path / "both")
    found, _ = contest(Comparison(tmp_path / "both"))
    assert (found.winner, found.second, found.spread) == ("fedasync", "", None)


def test_a_fleet_that_loses_everything_or_takes_no_time(facts: Callable[..., Scenario]) -> None:
    hopeless = facts("fleet.crash=1.0")
    assert (hopeless.unheard, hopeless.lost) == (1.0, 1.0)
    timeless = facts("fleet.seconds_per_task=0")
    assert (timeless.age, timeless.epochs, timeless.speed_ratio) == (0.0, 0.0, 1.0)

"""Advice: the race, its result, the learning-rate finder, and both commands."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from latecomer import cli
from latecomer.errors import BadInput, RunFailed
from latecomer.study.advice import race as racing
from latecomer.study.advice.advice import Subject, advise, subject
from latecomer.study.advice.race import (
    RATES,
    Candidate,
    Entry,
    RacePlan,
    Stage,
    claim,
    plan_race,
    race,
    race_result,
)
from latecomer.study.advice.suggestions import Suggestion
from latecomer.study.advice.wording import (
    edge_line,
    lines,
    race_opening,
    result_line,
    stage_table,
)
from latecomer.study.compare import Cell
from latecomer.study.config import load_config

TINY = """
[data]
alpha = 0.5
[fleet]
devices = 10
profile = "tiers"
[model]
hidden = [8]
[training]
local_epochs = 1
lr = 0.1
[stop]
updates = 40
[strategy]
name = "fedasync"
alpha = 0.4
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    monkeypatch.chdir(tmp_path)

    def go(command: str, *args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latecomer", command, *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return go


def candidate(name: str, lr: float = 0.1, configured: bool = False) -> Candidate:
    return Candidate({"name": name}, lr, configured)


def stage(*entries: Entry) -> Stage:
    ordered = sorted(entries, key=lambda e: e.mean, reverse=True)
    return Stage("final", 1.0, (1, 2, 3), tuple(ordered))


def entry(name: str, *scores: float, cpu: float = 1.0, configured: bool = False) -> Entry:
    return Entry(candidate(name, configured=configured), scores, cpu)


def plan_of(**changes: object) -> RacePlan:
    made = RacePlan({}, (candidate("feddc"), candidate("fadas")), 0.25, (1, 2, 3))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_margin_beyond_the_spread_wins() -> None:
    found = race_result(stage(entry("feddc", 0.95, 0.90, 0.93), entry("fadas", 0.91, 0.85, 0.89)))
    assert not found.tied
    assert found.chosen.candidate.name == "feddc"
    assert found.margin == pytest.approx(0.0433, abs=1e-3)
    # Seed by seed: what seeds have in common does not blur it.
    assert found.spread == pytest.approx(0.0058, abs=1e-3)
    assert "Best: feddc at lr 0.1, 0.043 ± 0.006 ahead of fadas" in result_line(found, plan_of())


def test_a_tie_has_no_winner_and_the_cheapest_in_cpu_time_is_named() -> None:
    dear = entry("latecomer", 0.95, 0.90, 0.93, cpu=12.0)
    found = race_result(stage(dear, entry("fadas", 0.91, 0.93, 0.92, cpu=3.0)))
    assert (found.best.candidate.name, found.chosen.candidate.name) == ("latecomer", "fadas")
    text = result_line(found, plan_of())
    assert "No winner" in text
    assert "within the spread" in text
    assert "Take fadas at lr 0.1: it took the least CPU time, 3.0 s per run" in text
    assert "Best" not in text


def test_in_a_tie_the_configured_strategy_is_kept_whatever_it_costs() -> None:
    mine = entry("echopfl", 0.90, 0.92, cpu=9.0, configured=True)
    found = race_result(stage(entry("latecomer", 0.92, 0.91, cpu=1.0), mine))
    assert found.chosen == mine
    assert "Take echopfl (configured) at lr 0.1: it is configured" in result_line(found, plan_of())


def test_a_tie_of_some_leaves_the_others_out() -> None:
    near, far = entry("fadas", 0.91, 0.94, cpu=3.0), entry("fedavg", 0.5, 0.5, cpu=0.1)
    found = race_result(stage(entry("feddc", 0.93, 0.93, cpu=5.0), near, far))
    assert found.tied == (near,)
    assert found.chosen == near


def test_one_seed_decides_nothing() -> None:
    found = race_result(stage(entry("feddc", 0.95), entry("fadas", 0.5)))
    assert found.tied
    assert "more --seeds" in result_line(found, plan_of(seeds=(1,)))


def test_a_failed_candidate_loses() -> None:
    found = race_result(stage(entry("feddc", 0.2, 0.2, 0.2), entry("fadas", 0.9, -inf, 0.9)))
    assert found.chosen.candidate.name == "feddc"
    assert "failed or missed the target" in result_line(found, plan_of())
    none = race_result(stage(entry("feddc", -inf), entry("fadas", -inf)))
    assert "every candidate failed" in result_line(none, plan_of())


def test_a_rate_at_the_edge_is_reported() -> None:
    some = [Entry(candidate("fadas", lr), (0.9,), 1.0) for lr in (0.1, 0.2, 0.5)]
    assert "largest" in (edge_line(some[2], stage(*some)) or "")
    assert edge_line(some[1], stage(*some)) is None


def test_all_strategies_are_tuned_alike(config: Path) -> None:
    found = advise(subject(config))
    plan = plan_race(found.subject, found.suggestions, [1, 2])
    rates: dict[str, list[float]] = {}
    for each in plan.candidates:
        rates.setdefault(each.name, []).append(each.lr)
    assert {"fedasync", "fedbuff", "latecomer"} <= set(rates)
    assert set(map(tuple, rates.values())) == {(0.011, 0.033, 0.1, 0.3, 0.9)}
    mine = next(c for c in plan.candidates if c.configured)
    assert mine.strategy == {"name": "fedasync", "alpha": 0.4}
    assert plan.base["stop"]["updates"] == 40
    assert plan.cost() == len(rates) * (plan.length * len(RATES) + 2)


def test_a_suggestion_that_the_config_forbids_is_left_out(config: Path) -> None:
    found = subject(config, ["privacy.epsilon=1.0"])
    plan = plan_race(found, [Suggestion("ifca", ""), Suggestion("fedbuff", "")], [1])
    assert {c.name for c in plan.candidates} == {"fedasync", "fedbuff"}
    assert "left out: strategy 'ifca'" in race_opening(plan)


def test_a_short_run_has_updates_of_late_devices_and_drift_is_not_cut(config: Path) -> None:
    late = ["fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay=6"]
    found = subject(config, [*late, "stop.updates=400"])
    assert found.facts.scenario is not None
    wanted = 2 * found.facts.scenario.first_update_after
    assert 0.25 < wanted < 1
    assert plan_race(found, (), [1]).length == pytest.approx(wanted, abs=0.01)
    assert plan_race(subject(config, ["data.drift.kind=grow"]), (), [1]).length == 1.0


def test_personal_strategies_are_scored_by_local_accuracy(config: Path) -> None:
    found = advise(subject(config, ["data.drift.kind=shift"]))
    assert "echopfl" in [s.name for s in found.suggestions]
    plan = plan_race(found.subject, found.suggestions, [1])
    assert plan.column == "client_accuracy"
    assert plan.base["evaluate"]["clients"] is True
    assert plan_race(found.subject, found.suggestions, [1], "all").column == "accuracy"


def few(found: Subject, *names: str) -> RacePlan:
    """A race of some at two rates."""
    made = plan_race(found, (), [1, 2])
    chosen = tuple(candidate(name, lr) for name in names for lr in (0.001, 0.1))
    return replace(made, candidates=chosen, length=0.5)


def test_every_strategy_is_in_both_stages_and_nothing_runs_twice(
    config: Path, tmp_path: Path
) -> None:
    plan, done = few(subject(config), "fedavg", "fedasync", "standalone"), list[str]()

    def on_score(cell: Cell, score: float) -> None:
        done.append(f"{cell.strategy} {cell.seed}")

    tuning, final = race(plan, tmp_path / "race", 1, on_score)
    assert (tuning.seeds, final.seeds) == ((3,), (1, 2))  # rates are tuned on another seed
    assert (tuning.length, final.length) == (0.5, 1.0)
    assert len(tuning.entries) == 6
    assert len(final.entries) == 3
    for each in (tuning, final):
        means = [entry.mean for entry in each.entries]
        assert means == sorted(means, reverse=True)
        assert all(entry.cpu_seconds > 0 for entry in each.entries)
    best = {e.candidate.name: e.candidate for e in reversed(tuning.entries)}
    assert {e.candidate.name: e.candidate for e in final.entries} == best
    assert best["fedasync"].lr == 0.1
    assert len(done) == 6 + 3 * 2
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "race").rglob("*.csv")}
    assert list(race(plan, tmp_path / "race", 1, on_score)) == [tuning, final]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_candidate_that_fails_does_not_end_the_race(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = racing.run_cell

    def fails(cell: Cell, folder: Path) -> dict[str, object]:
        if cell.strategy.startswith("fedavg"):
            raise RunFailed("diverged")
        return real(cell, folder)

    monkeypatch.setattr(racing, "run_cell", fails)
    plan = few(subject(config), "fedavg", "fedasync")
    tuning, final = race(plan, tmp_path / "race", 1, lambda cell, score: None)
    assert tuning.entries[-1].scores == (-inf,)
    assert race_result(final).chosen.candidate.name == "fedasync"
    assert stage_table(tuning, plan).row_count == 4


def test_time_to_a_target_decides_if_one_is_given(config: Path, tmp_path: Path) -> None:
    plan = replace(few(subject(config), "fedavg", "fedasync"), target=0.15)
    _, final = race(plan, tmp_path / "race", 1, lambda cell, score: None)
    assert all(score < 0 for entry in final.entries for score in entry.scores)
    assert "seconds to accuracy 0.15" in race_opening(plan)
    never = replace(few(subject(config), "fedavg"), target=1.0)
    found = next(race(never, tmp_path / "never", 1, lambda cell, score: None)).entries[0]
    assert found.scores == (-inf,)
    assert found.spread is nan


def test_a_folder_holds_one_race(config: Path, tmp_path: Path) -> None:
    plan = few(subject(config), "fedasync")
    claim(plan, tmp_path / "out")
    claim(plan, tmp_path / "out")  # the same race is resumed
    with pytest.raises(BadInput, match="another race"):
        claim(replace(plan, seeds=(1, 2, 3)), tmp_path / "out")


def test_the_text_can_be_pasted_and_names_what_was_measured(config: Path) -> None:
    text = "\n".join(lines(advise(subject(config, ["training.lr=0.4"]))))
    assert f"latecomer run {config} --set 'training.lr=0.4' --set 'strategy={{name = " in text
    assert "Measured: labels of 10 devices" in text
    assert "Measured: a dry run of the fleet (40 updates, nothing trained)" in text
    assert "order:\n1. heterogeneous data: " in text
    assert "\n2. unequal speeds: " in text


def test_the_command_without_a_config_is_about_the_quickstart(call: Call) -> None:
    code, out, _ = call("advise")
    assert code == 0
    assert "unequal speeds" in out
    assert "latecomer run --set" in out


def test_the_command_writes_json(call: Call, tmp_path: Path, config: Path) -> None:
    code, out, _ = call("advise", "tiny.toml", "--json", "--out", "written")
    assert code == 0
    document = json.loads(out)
    assert document == json.loads((tmp_path / "written" / "advice.json").read_text())
    assert document["dominates"] is None  # nothing was measured that has an effect
    loaded = call("advise", "tiny.toml", "--json", "--set", "server.merge_seconds=9")[1]
    assert json.loads(loaded)["dominates"] == "server load"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["advise", "tinny.toml"], ["tinny.toml", "did you mean 'tiny.toml'"]),
        (["advise", "."], ["metrics.csv", "compare.json"]),
        (["advise", "tiny.toml", "--set", "training.lrr=1"], ["--set", "training.lrr"]),
        (["advise", "tiny.toml", "--for", "all"], ["--try"]),
        (["advise", "tiny.toml", "--try", "--for", "them"], ["--for", "devices"]),
        (["advise", "tiny.toml", "--try", "--for", "late"], ["fleet.late.classes"]),
        (["advise", "tiny.toml", "--try", "--seeds", "1,1"], ["--seeds"]),
        (["advise", "tiny.toml", "--try", "--seeds", "x"], ["--seeds"]),
        (["tune", "tinny.toml"], ["tinny.toml", "did you mean 'tiny.toml'"]),
        (["tune", "tiny.toml", "--set", "training.lr=-1"], ["training.lr"]),
        (["tune", "tiny.toml", "--set", "strategy.name=unstale"], ["unstale", "reference"]),
        (["tune", "tiny.toml", "--seeds", "1,1"], ["--seeds"]),
    ],
)
def test_bad_input_is_one_line(call: Call, config: Path, args: list[str], words: list[str]) -> None:
    code, _, err = call(*args)
    assert code == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (config.parent / "runs").exists()


def test_a_learning_rate_is_found(call: Call, config: Path, tmp_path: Path) -> None:
    """A rate that is far too small is tuned to one that learns; the same command continues."""
    asked = ("tune", "tiny.toml", "--set", "training.lr=0.001", "--set", "stop.updates=80",
             "--seeds", "1", "--out", "out")  # fmt: skip
    code, out, _ = call(*asked)
    assert code == 0
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["configured"] == 0.001
    assert 0.027 < found["lr"] < 0.8  # beyond the first grid, and no longer at its edge
    assert f"Best learning rate: training.lr={found['lr']:g} (configured: 0.001)" in out
    entries = found["tuning"]["entries"]
    assert 8 <= len(entries) <= 10
    assert {each["candidate"]["strategy"]["name"] for each in entries} == {"fedasync"}
    assert call(*asked)[1].splitlines()[-1] == out.splitlines()[-1]
    assert json.loads((tmp_path / "out" / "tune.json").read_text()) == found
    seconds = {
        json.loads(path.read_text())["virtual_seconds"]
        for path in (tmp_path / "out" / "tuning").glob("*/summary.json")
    }
    assert len(seconds) == 1  # equal virtual time


def test_no_rate_that_works_is_a_failed_run(
    call: Call, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(cell: Cell, folder: Path) -> dict[str, object]:
        raise RunFailed("diverged")

    monkeypatch.setattr(racing, "run_cell", fails)
    code, _, err = call("tune", "tiny.toml", "--seeds", "1", "--out", "out")
    assert code == 1
    assert "every learning rate failed" in err


@pytest.mark.slow
def test_a_whole_race_by_command(call: Call, config: Path, tmp_path: Path) -> None:
    asked = ("advise", "tiny.toml", "--try", "--seeds", "1,2", "--out", "out", "--jobs", "2")
    code, out, _ = call(*asked)
    assert code == 0
    assert "final: 100% of the run, seeds 1, 2" in out
    written = load_config(tmp_path / "out" / "advice.toml")
    chosen = json.loads((tmp_path / "out" / "advice.json").read_text())["result"]["chosen"]
    assert written.strategy.name == chosen["candidate"]["strategy"]["name"]
    assert written.training.lr == chosen["candidate"]["lr"]
    assert written.stop.updates == 40

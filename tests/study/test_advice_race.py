"""Advice: the race, its result, and the command."""

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
from latecomer.study.advice.advice import Race, advise
from latecomer.study.advice.race import (
    CONFIGURED,
    Candidate,
    Entry,
    RacePlan,
    Rung,
    plan_race,
    race,
    race_result,
)
from latecomer.study.advice.remedies import Suggestion
from latecomer.study.advice.subject import Subject, subject
from latecomer.study.advice.wording import (
    configured_line,
    edge_line,
    lines,
    race_opening,
    result_line,
    rung_table,
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
[compare.fedbuff]
training.lr = 0.3
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

    def go(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latecomer", "advise", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return go


def candidate(name: str, label: str = "", lr: float = 0.1) -> Candidate:
    return Candidate(label or name, {"name": name}, lr)


def rung(**scores: tuple[float, ...]) -> Rung:
    entries = [Entry(candidate(name), each, 0.0) for name, each in scores.items()]
    return Rung(1.0, (1, 2, 3), tuple(sorted(entries, key=lambda e: e.mean, reverse=True)))


def plan_of(**changes: object) -> RacePlan:
    made = RacePlan(
        {}, (candidate("feddc"), candidate("fadas")), (1.0, 1.0, 1.0), (1, 2, 3), "all", None
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_margin_beyond_the_spread_wins() -> None:
    found = race_result(rung(feddc=(0.95, 0.90, 0.93), fadas=(0.91, 0.85, 0.89)))
    assert found.decided
    assert found.chosen.name == "feddc"
    assert found.margin == pytest.approx(0.0433, abs=1e-3)
    # Seed by seed: what seeds have in common does not blur it.
    assert found.spread == pytest.approx(0.0058, abs=1e-3)
    assert "Winner: feddc" in result_line(found, plan_of())


def test_within_the_spread_the_simplest_is_taken() -> None:
    found = race_result(rung(feddc=(0.95, 0.90, 0.93), fadas=(0.91, 0.93, 0.92)))
    assert not found.decided
    assert (found.best.name, found.chosen.name) == ("feddc", "fadas")
    text = result_line(found, plan_of())
    assert "No winner" in text
    assert "Take the simplest: fadas" in text


def test_the_configured_strategy_is_the_simplest() -> None:
    mine = Entry(candidate("echopfl", CONFIGURED), (0.90, 0.92), 0.9)
    best = Entry(candidate("fedasync"), (0.92, 0.91), 0.9)
    assert race_result(Rung(1.0, (1, 2), (best, mine))).chosen.label == CONFIGURED


def test_one_seed_decides_nothing() -> None:
    found = race_result(rung(feddc=(0.95,), fadas=(0.5,)))
    assert not found.decided
    assert "more --seeds" in result_line(found, plan_of(seeds=(1,)))


def test_a_failed_candidate_loses() -> None:
    found = race_result(rung(feddc=(0.2, 0.2, 0.2), fadas=(0.9, -inf, 0.9)))
    assert found.decided
    assert found.chosen.name == "feddc"
    assert "failed or missed the target" in result_line(found, plan_of())
    none = race_result(rung(feddc=(-inf,), fadas=(-inf,)))
    assert "every candidate failed" in result_line(none, plan_of())


def test_a_rate_at_the_edge_is_reported() -> None:
    several = tuple(candidate("fadas", lr=lr) for lr in (0.1, 0.2, 0.5))
    found = race_result(Rung(1.0, (1,), (Entry(several[2], (0.9,), 0.9),)))
    assert "largest" in (edge_line(found, plan_of(candidates=several)) or "")
    inside = replace(found, chosen=several[1])
    assert edge_line(inside, plan_of(candidates=several)) is None


def test_the_plan_has_what_is_configured_and_what_is_suggested(config: Path) -> None:
    found = advise(subject(config))
    plan = plan_race(found.subject, found.suggestions, [1, 2])
    labels = {c.label for c in plan.candidates}
    assert CONFIGURED in labels
    assert 3 <= len(labels) <= 6
    rates = sorted(c.lr for c in plan.candidates if c.label == "fedbuff")
    assert rates == [0.12, 0.3, 0.75]  # around the config's own for it
    mine = next(c for c in plan.candidates if c.label == CONFIGURED)
    assert mine.strategy == {"name": "fedasync", "alpha": 0.4}
    assert plan.base["stop"]["updates"] == 40
    assert "compare" not in plan.base


def test_a_suggestion_that_the_config_forbids_is_left_out(config: Path) -> None:
    found = subject(config, ["privacy.epsilon=1.0"])
    asked = [Suggestion("ifca", "", ""), Suggestion("fedbuff", "", "")]
    plan = plan_race(found, asked, [1])
    assert {c.label for c in plan.candidates} == {CONFIGURED, "fedbuff"}
    assert "left out: strategy 'ifca'" in race_opening(plan)


def test_a_short_run_has_updates_of_late_devices_and_drift_is_not_cut(config: Path) -> None:
    late = ["fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay=6"]
    found = advise(subject(config, [*late, "stop.updates=150"]))
    first = plan_race(found.subject, found.suggestions, [1]).lengths[0]
    first_update = (
        found.subject.facts.scenario.first_update_after if found.subject.facts.scenario else 0
    )
    assert first == pytest.approx(max(0.25, min(1.0, 2 * first_update)), abs=0.01)
    assert first > 0.25
    moving = advise(subject(config, ["data.drift.kind=grow"]))
    assert plan_race(moving.subject, moving.suggestions, [1]).lengths == (1.0, 1.0, 1.0)


def test_personal_strategies_are_scored_by_local_accuracy(config: Path) -> None:
    found = advise(subject(config, ["data.drift.kind=shift"]))
    assert "echopfl" in [s.name for s in found.suggestions]
    plan = plan_race(found.subject, found.suggestions, [1])
    assert plan.score_on == "devices"
    assert plan.base["evaluate"]["clients"] is True
    assert plan_race(found.subject, found.suggestions, [1], "all").score_on == "all"


def few(found: Subject, *names: str) -> RacePlan:
    """A race of some at one rate."""
    made = plan_race(found, advise(found).suggestions, [1, 2])
    chosen = tuple(candidate(name) for name in names)
    return replace(made, candidates=chosen, lengths=(0.5, 0.5, 1.0), configured=None)


def test_halving_keeps_the_best_and_runs_nothing_twice(config: Path, tmp_path: Path) -> None:
    plan, done = few(subject(config), "fedavg", "fedasync", "standalone"), list[str]()

    def on_score(cell: Cell, score: float) -> None:
        done.append(f"{cell.strategy} {cell.seed}")

    rungs = list(race(plan, tmp_path / "race", 1, on_score))
    assert [len(rung.entries) for rung in rungs] == [3, 2, 2]
    assert [rung.seeds for rung in rungs] == [(1,), (1, 2), (1, 2)]
    for rung in rungs:
        means = [entry.mean for entry in rung.entries]
        assert means == sorted(means, reverse=True)
    kept = [{e.candidate.label for e in rung.entries if e.kept} for rung in rungs]
    assert kept[0] == {e.candidate.label for e in rungs[1].entries}
    assert len(kept[2]) == 1
    assert len(done) == 3 + 4 + 4
    assert len(list((tmp_path / "race" / "length-0.5").iterdir())) == 3 + 2
    again = list(race(plan, tmp_path / "race", 1, on_score))
    assert again == rungs


def test_what_is_configured_is_in_the_last_rung(config: Path, tmp_path: Path) -> None:
    plan = replace(
        few(subject(config), "fedavg", "fedsea"), configured=candidate("standalone", CONFIGURED)
    )
    *early, final = race(plan, tmp_path / "race", 1, lambda cell, score: None)
    assert all(CONFIGURED not in {e.candidate.label for e in rung.entries} for rung in early)
    assert final.entries[-1].candidate.label == CONFIGURED
    assert "As configured, standalone at lr 0.1" in (configured_line(final, plan) or "")
    assert configured_line(replace(final, entries=final.entries[:2]), plan) is None


def test_a_candidate_that_fails_does_not_end_the_race(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = racing.run_cell

    def fails(cell: Cell, folder: Path) -> dict[str, object]:
        if cell.strategy.startswith("fedavg"):
            raise RunFailed("diverged")
        return real(cell, folder)

    monkeypatch.setattr(racing, "run_cell", fails)
    plan = few(subject(config), "fedavg", "fedasync", "fedbuff")
    rungs = list(race(plan, tmp_path / "race", 1, lambda cell, score: None))
    assert rungs[0].entries[-1].scores == (-inf,)
    assert "fedavg" not in {e.candidate.label for e in rungs[1].entries}
    assert rung_table(1, rungs[0], plan).row_count == 3


def test_time_to_a_target_decides_if_one_is_given(config: Path, tmp_path: Path) -> None:
    plan = replace(few(subject(config), "fedavg", "fedasync"), target=0.2)
    rungs = list(race(plan, tmp_path / "race", 1, lambda cell, score: None))
    assert all(score < 0 for entry in rungs[-1].entries for score in entry.scores)
    assert "seconds to 0.2" in race_opening(plan)
    never = replace(few(subject(config), "fedavg"), target=1.0)
    (entry,) = next(race(never, tmp_path / "never", 1, lambda cell, score: None)).entries
    assert entry.scores == (-inf,)
    assert entry.spread is nan


def test_what_is_written_can_be_run_and_the_folder_holds_one_race(
    config: Path, tmp_path: Path
) -> None:
    found = advise(subject(config))
    plan = few(found.subject, "fedasync", "fedbuff")
    made = Race(found, plan, tmp_path / "out")
    for _ in made.run(1, lambda cell, score: None):
        assert json.loads((tmp_path / "out" / "advice.json").read_text())["result"] is None
    winner = made.finish().chosen
    config_written = load_config(tmp_path / "out" / "advice.toml")
    assert config_written.strategy.name == winner.name
    assert config_written.training.lr == winner.lr
    assert config_written.stop.updates == 40
    document = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert document["result"]["chosen"]["strategy"]["name"] == winner.name
    Race(found, plan, tmp_path / "out")  # the same race is resumed
    with pytest.raises(BadInput, match="another race"):
        Race(found, replace(plan, seeds=(1, 2, 3)), tmp_path / "out")


def test_the_text_can_be_pasted_and_names_its_sources(config: Path) -> None:
    text = "\n".join(lines(advise(subject(config, ["training.lr=0.4"]))))
    assert f"latecomer run {config} --set 'training.lr=0.4' --set 'strategy={{name = " in text
    assert "Main problem: unequal device speeds" in text
    assert "[docs/strategies.md" in text


def test_the_command_without_a_config_is_about_the_quickstart(call: Call) -> None:
    code, out, _ = call()
    assert code == 0
    assert "unequal device speeds" in out
    assert "latecomer run --set" in out


def test_the_command_writes_json(call: Call, tmp_path: Path, config: Path) -> None:
    code, out, _ = call("tiny.toml", "--json", "--out", "written")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "written" / "advice.json").read_text())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tinny.toml"], ["tinny.toml", "did you mean 'tiny.toml'"]),
        (["."], ["metrics.csv", "compare.json"]),
        (["tiny.toml", "--set", "training.lrr=1"], ["--set", "training.lrr"]),
        (["tiny.toml", "--for", "all"], ["--try"]),
        (["tiny.toml", "--try", "--for", "them"], ["--for", "devices"]),
        (["tiny.toml", "--try", "--for", "late"], ["fleet.late.classes"]),
        (["tiny.toml", "--try", "--seeds", "1,1"], ["--seeds"]),
        (["tiny.toml", "--try", "--seeds", "x"], ["--seeds"]),
    ],
)
def test_bad_input_is_one_line(call: Call, config: Path, args: list[str], words: list[str]) -> None:
    code, _, err = call(*args)
    assert code == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_a_whole_race_by_command(call: Call, config: Path, tmp_path: Path) -> None:
    code, out, _ = call("tiny.toml", "--try", "--seeds", "1,2", "--out", "out", "--jobs", "2")
    assert code == 0
    assert "rung 3: 100% of the run, seeds 1, 2" in out
    assert "inner" in out
    assert (tmp_path / "out" / "advice.toml").is_file()

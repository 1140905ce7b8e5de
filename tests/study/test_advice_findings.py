"""Advice: every finding on both sides of its threshold, their order, and what is suggested."""

from dataclasses import replace

import pytest

from latecomer.strategies.recipe import find_recipe, recipes, resolve_options
from latecomer.study.advice.facts import Budget, Facts, Measured, Run, Scenario
from latecomer.study.advice.findings import NOTHING, findings_of
from latecomer.study.advice.suggestions import (
    ALWAYS,
    MAX_SUGGESTIONS,
    MECHANISMS,
    Suggestion,
    changes_for,
    suggest,
)
from latecomer.study.config import with_settings
from latecomer.study.learning_rate import RateProblem, rate_problem

CALM = Scenario(devices=100, examples=50, epochs=80, age=1.0)
LATE = replace(
    CALM,
    late=10,
    stragglers=10,
    straggler_age=20.0,
    straggler_share=0.1,
    straggler_classes={"5": 0.9},
    skew=0.94,
)
GOOD = Run("fedasync", lr=0.5, accuracy=0.95, dip=0.01, local=0.95)
SPENDING = Budget(False, 0.0, 48.0, 66.0, 40.0, 61.0)


def of(scenario: Scenario | None = None, run: Run | None = None) -> Facts:
    return Facts(scenario, run, (), "fedasync", 0.5, 2)


def kinds(facts: Facts) -> list[str]:
    return [finding.kind for finding in findings_of(facts)]


# what is changed in a calm scenario: just below the threshold, and at it
SCENARIOS = [
    ("privacy budget", {"budget": None}, {"budget": SPENDING}),
    (
        "late classes",
        {"straggler_classes": {"5": 0.9}, "straggler_age": 3.9},
        {"straggler_classes": {"5": 0.9}, "straggler_age": 4.0},
    ),
    ("staleness", {"straggler_age": 3.9}, {"straggler_age": 4.0}),
    ("staleness", {"straggler_age": 9.0, "straggler_classes": {"5": 0.9}}, {"straggler_age": 9.0}),
    ("concept shift", {"drift": "grow"}, {"drift": "shift", "concept_shift": True}),
    ("unavailable devices", {"offline": 0.09}, {"offline": 0.1}),
    ("unavailable devices", {"without_update": 0.09}, {"without_update": 0.1}),
    ("unavailable devices", {"lost": 0.09}, {"lost": 0.1}),
    ("unequal speeds", {"speed_ratio": 2.9}, {"speed_ratio": 3.0}),
    ("heterogeneous data", {"skew": 0.84}, {"skew": 0.85}),
    ("communication", {"transfer": 0.49}, {"transfer": 0.5}),
    ("server load", {"server_load": 0.49}, {"server_load": 0.5}),
]
RUNS = [
    ("learning rate", {"rate": None}, {"rate": RateProblem(True, "flat", 1.5)}),
    (
        "low local accuracy",
        {"local_late": 0.91, "local_others": 0.95},
        {"local_late": 0.8, "local_others": 0.95},
    ),
    ("oscillation", {"dip": 0.04}, {"dip": 0.05}),
    ("oscillation", {"dip": 0.2, "gain": 0.02}, {"dip": 0.2, "gain": 0.01}),
    ("idle devices", {"idle": 0.29}, {"idle": 0.3}),
    ("lost work", {"dropped": 0.09}, {"dropped": 0.1}),
    ("run too short", {"gain": 0.01}, {"gain": 0.02}),
]


@pytest.mark.parametrize(("kind", "below", "at"), SCENARIOS)
def test_a_finding_about_the_scenario(kind: str, below: dict, at: dict) -> None:
    assert kind not in kinds(of(replace(CALM, **below)))
    assert kind in kinds(of(replace(CALM, **at)))


@pytest.mark.parametrize(("kind", "below", "at"), RUNS)
def test_a_finding_about_a_run(kind: str, below: dict, at: dict) -> None:
    assert kind not in kinds(of(run=replace(GOOD, **below)))
    assert kind in kinds(of(run=replace(GOOD, **at)))


def test_mechanisms_are_for_findings_that_exist() -> None:
    assert set(MECHANISMS) <= {kind for kind, _, _ in SCENARIOS + RUNS}
    assert {name for names in MECHANISMS.values() for name in names} <= set(recipes())
    assert all(list(names) == sorted(names) for names in MECHANISMS.values())


def test_without_problems_the_finding_is_nothing() -> None:
    assert findings_of(of(CALM, GOOD)) == [NOTHING]


def test_the_largest_measured_share_is_first_and_the_rest_in_alphabetical_order() -> None:
    busy = replace(LATE, speed_ratio=8.0, transfer=0.6, server_load=1.5)
    found = findings_of(of(busy, replace(GOOD, dip=0.2)))
    assert [each.kind for each in found] == [
        "communication",
        "server load",
        "oscillation",
        "late classes",
        "heterogeneous data",
        "unequal speeds",
    ]
    assert [each.effect for each in found[:4]] == pytest.approx([0.6, 1 / 3, 0.2, 0.1])
    assert all(each.effect is None for each in found[4:])


def test_an_overloaded_server_dominates() -> None:
    """At 825% load nearly nine of ten updates are never merged, whatever else there is."""
    loaded = replace(LATE, server_load=8.25, offline=0.3, speed_ratio=8.0, budget=SPENDING)
    for run in (None, replace(GOOD, dip=0.2, local_late=0.5, local_others=0.9)):
        first = findings_of(of(loaded, run))[0]
        assert first.kind == "server load"
        assert first.effect == pytest.approx(1 - 1 / 8.25)
        assert "825%" in first.text
    (change,) = [c for c in changes_for([first], of(loaded)) if c.settings]
    assert change.settings == ("training.local_epochs=4",)


@pytest.mark.parametrize(
    "losses",
    [
        [2.33, 2.32, 2.32, 2.31, 2.31, 2.31, 2.30, 2.30],
        [2.33 - 0.03 * step for step in range(25)],
    ],
)
def test_a_run_that_learns_slowly_is_told_to_raise_its_rate(losses: list[float]) -> None:
    rate = rate_problem(losses, 0.0, 0.1, 0.01, ended=True)
    slow = replace(GOOD, lr=0.01, accuracy=0.12, dip=0.0, gain=0.01, rate=rate)
    facts = of(LATE, slow)
    findings = findings_of(facts)
    assert findings[0].kind == "learning rate"
    assert "training.lr = 0.01 is too small" in findings[0].text
    assert "oscillation" not in [each.kind for each in findings]
    assert changes_for(findings, facts)[0].settings == ("training.lr=0.03",)


def test_the_text_has_the_evidence() -> None:
    finding = findings_of(of(LATE))[0]
    assert "90% of class 5" in finding.text
    assert "20.0 epochs" in finding.text
    assert (finding.effect, finding.unit) == (0.1, "of examples")


def names(facts: Facts) -> list[str]:
    return [each.name for each in suggest(findings_of(facts), facts)]


EVERYTHING = [replace(CALM, **at) for _, _, at in SCENARIOS] + [replace(LATE, busy=True)]


@pytest.mark.parametrize("scenario", EVERYTHING)
def test_no_strategy_is_first_by_house_rule(scenario: Scenario) -> None:
    found = names(of(scenario))
    assert found == sorted(found)
    assert found[0] != "latecomer"
    assert set(ALWAYS) <= set(found)
    assert len(found) <= MAX_SUGGESTIONS


def test_what_a_comparison_measured_comes_first() -> None:
    measured = (Measured("semi-async", 0.9, 0.01, 3), Measured("latecomer", 0.8, 0.01, 3))
    facts = replace(of(replace(CALM, skew=0.9)), comparison=measured)
    assert names(facts) == ["semi-async", "latecomer", "ca2fl", "fedbuff"]


def test_strategies_that_need_more_than_noised_updates_are_not_for_private_runs() -> None:
    private = replace(CALM, concept_shift=True, budget=SPENDING, speed_ratio=8.0, skew=0.9)
    assert not {"ca2fl", "ifca"} & set(names(of(private)))
    assert "dp-fedasync" in names(of(private))


@pytest.mark.parametrize("scenario", EVERYTHING)
@pytest.mark.parametrize("devices", [4, 100])
def test_all_that_is_suggested_can_be_pasted(scenario: Scenario, devices: int) -> None:
    facts = of(replace(scenario, devices=devices), replace(GOOD, dip=0.2))
    findings = findings_of(facts)
    foreign = {"strategy": {"name": "fedasync", "alpha": 0.3}}
    for suggestion in suggest(findings, facts):
        tree = with_settings(foreign, suggestion.settings)
        assert tree["strategy"].pop("name") == suggestion.name
        resolve_options(find_recipe(suggestion.name), tree["strategy"])
    for each in changes_for(findings, facts):
        assert with_settings({}, each.settings)


def test_options_depend_on_the_fleet() -> None:
    def options(scenario: Scenario) -> dict[str, Suggestion]:
        facts = of(scenario)
        return {each.name: each for each in suggest(findings_of(facts), facts)}

    assert options(replace(LATE, busy=True))["feddc"].options == {"surrogates": True}
    assert options(LATE)["feddc"].options == {}
    assert options(replace(LATE, devices=8))["fedbuff"].options == {"size": 4}
    assert options(LATE)["ca2fl"].options == {"size": 10, "server_lr": 0.1}


def test_a_total_budget_is_for_the_busiest_device() -> None:
    facts = of(replace(CALM, budget=SPENDING))
    (found,) = changes_for(findings_of(facts), facts)
    assert "privacy.tasks=61" in found.settings
    assert 'privacy.mode="whole-run"' in found.settings
    for within in (replace(SPENDING, spent_max=8.0), replace(SPENDING, limit=70.0)):
        facts = of(replace(CALM, budget=within))
        assert changes_for(findings_of(facts), facts) == []

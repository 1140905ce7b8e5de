"""Advice: every rule on both sides of its threshold, by facts made by hand."""

from dataclasses import replace
from math import inf

import pytest

from latecomer.strategies.recipe import find_recipe, recipes, resolve_options
from latecomer.study.advice import rules
from latecomer.study.advice.facts import Budget, Facts, Run, Scenario
from latecomer.study.advice.remedies import (
    FLAGSHIP,
    SETTINGS,
    STRATEGIES,
    change,
    simplicity,
    suggest,
)
from latecomer.study.advice.rules import RULES, diagnose
from latecomer.study.advice.wording import TITLES
from latecomer.study.config import with_settings

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
GOOD = Run("fedasync", lr=0.5, chance=0.1, accuracy=0.95, dip=0.01, gain=0.0, local_mean=0.95)
SPENDING = Budget(5.0, False, 0.0, 48.0, 66.0, inf, 40.0, 61.0, False, False)


def of(scenario: Scenario | None = None, run: Run | None = None) -> Facts:
    return Facts(scenario, run, None, "fedasync", 0.5, 100)


def kinds(facts: Facts) -> list[str]:
    return [finding.kind for finding in diagnose(facts)]


# what is changed in a calm scenario: just below the threshold, and at it
SCENARIOS = [
    ("budget", {"budget": None}, {"budget": SPENDING}),
    (
        "late-classes",
        {"straggler_classes": {"5": 0.9}, "straggler_age": 3.9},
        {"straggler_classes": {"5": 0.9}, "straggler_age": 4.0},
    ),
    (
        "late-classes",
        {"straggler_classes": {}, "straggler_age": 20.0},
        {"straggler_classes": {"5": 0.9}, "straggler_age": 20.0},
    ),
    ("concept-shift", {"drift": "grow"}, {"drift": "shift", "concept_shift": True}),
    ("availability", {"offline": 0.19}, {"offline": 0.2}),
    ("availability", {"without_update": 0.09}, {"without_update": 0.1}),
    ("availability", {"lost": 0.09}, {"lost": 0.1}),
    ("staleness", {"straggler_age": 3.9}, {"straggler_age": 4.0}),
    ("staleness", {"straggler_age": 9.0, "straggler_classes": {"5": 0.9}}, {"straggler_age": 9.0}),
    ("speed", {"speed_ratio": 2.9}, {"speed_ratio": 3.0}),
    ("heterogeneity", {"skew": 0.84}, {"skew": 0.85}),
    ("bandwidth", {"transfer": 0.49}, {"transfer": 0.5}),
    ("server", {"server_load": 0.49}, {"server_load": 0.5}),
    ("sub-models", {"narrow": 0.0}, {"narrow": 0.1}),
]


@pytest.mark.parametrize(("kind", "below", "at"), SCENARIOS)
def test_a_rule_about_the_scenario(kind: str, below: dict, at: dict) -> None:
    assert kind not in kinds(of(replace(CALM, **below)))
    assert kind in kinds(of(replace(CALM, **at)))


RUNS = [
    ("divergence", {"accuracy": 0.16}, {"accuracy": 0.15}),
    ("divergence", {"refused": 0.04}, {"refused": 0.05}),
    ("concept-shift", {"local_mean": 0.6}, {"local_mean": 0.59}),
    ("concept-shift", {"local_mean": 0.4, "gain": 0.02}, {"local_mean": 0.4, "gain": 0.01}),
    ("concept-shift", {"local_mean": 0.4, "clusters": 2}, {"local_mean": 0.4}),
    (
        "local-accuracy",
        {"local_late": 0.91, "local_others": 0.95},
        {"local_late": 0.8, "local_others": 0.95},
    ),
    (
        "local-accuracy",
        {"local_rare": 0.94, "local_frequent": 0.95},
        {"local_rare": 0.5, "local_frequent": 1},
    ),
    ("oscillation", {"dip": 0.04}, {"dip": 0.05}),
    ("oscillation", {"dip": 0.2, "gain": 0.02}, {"dip": 0.2, "gain": 0.01}),
    ("idle", {"idle": 0.29}, {"idle": 0.3}),
    ("lost", {"dropped": 0.09}, {"dropped": 0.1}),
    ("compensation", {"compensated": None}, {"compensated": 3}),
    ("clusters", {"clusters": None}, {"clusters": 1}),
    ("unfinished", {"gain": 0.01}, {"gain": 0.02}),
]


@pytest.mark.parametrize(("kind", "below", "at"), RUNS)
def test_a_rule_about_a_run(kind: str, below: dict, at: dict) -> None:
    assert kind not in kinds(of(run=replace(GOOD, **below)))
    assert kind in kinds(of(run=replace(GOOD, **at)))


def test_every_rule_has_been_tried_and_has_a_name() -> None:
    tried = {kind for kind, _, _ in SCENARIOS + RUNS}
    assert len(tried) == len(RULES)
    assert set(TITLES) == tried | {"nothing"}
    assert set(STRATEGIES) | set(SETTINGS) <= tried


def test_without_problems_the_finding_is_nothing() -> None:
    (only,) = diagnose(of(CALM, GOOD))
    assert only.kind == "nothing"
    assert only == rules.NOTHING


def test_what_dominates_comes_first() -> None:
    assert kinds(of(replace(LATE, speed_ratio=8.0))) == ["late-classes", "speed", "heterogeneity"]
    private = replace(LATE, budget=SPENDING)
    assert kinds(of(private))[0] == "budget"
    assert kinds(of(private, replace(GOOD, accuracy=0.1)))[0] == "divergence"


def test_the_text_has_the_evidence() -> None:
    finding = diagnose(of(LATE))[0]
    assert "90% of class 5" in finding.text
    assert "20.0 epochs" in finding.text
    assert finding.evidence["share_of_5"] == 0.9


def test_speeds_without_late_devices() -> None:
    text = diagnose(of(replace(CALM, speed_ratio=8.0)))[0].text
    assert "8.0 times" in text
    assert "No device is late" in text
    assert "No device is late" not in diagnose(of(replace(CALM, speed_ratio=8.0, late=3)))[0].text


def test_a_synchronous_strategy_is_named() -> None:
    facts = replace(of(replace(CALM, speed_ratio=8.0)), strategy="fedavg")
    assert "fedavg waits" in diagnose(facts)[0].text


@pytest.mark.parametrize(
    ("spent", "text"),
    [
        ({"limit": 10.0, "allowed": 40.0}, "epsilon 10 allows 40 tasks"),
        ({}, "guarantee is weak"),
        ({"spent_mean": 6.0, "spent_max": 8.0}, "no budget is exceeded"),
    ],
)
def test_a_budget_is_described_by_its_total(spent: dict, text: str) -> None:
    facts = of(replace(CALM, budget=replace(SPENDING, **spent)))
    assert text in diagnose(facts)[0].text


def names(facts: Facts, known: set[str] | None = None) -> list[str]:
    return [s.name for s in suggest(diagnose(facts), facts, known or set(recipes()) - {FLAGSHIP})]


def test_late_classes_are_compensated_by_age() -> None:
    assert names(of(LATE))[:2] == ["feddc", "feddc-fedbuff"]
    assert names(of(replace(LATE, straggler_age=9.9)))[0] == "feddc-fedbuff"
    busy = suggest(diagnose(facts := of(replace(LATE, busy=True))), facts, recipes())
    assert {"surrogates": True} in [s.options for s in busy if s.name == "feddc"]


def test_the_default_strategy_is_first_and_never_alone() -> None:
    known = {*recipes(), FLAGSHIP}
    for facts in (of(CALM), of(LATE), of(replace(CALM, budget=SPENDING))):
        found = names(facts, known)
        assert found[0] == FLAGSHIP
        assert 3 <= len(found) <= 5
    assert FLAGSHIP not in names(of(CALM))


def test_what_a_scenario_forbids_is_not_suggested() -> None:
    assert "ca2fl" in names(of(replace(LATE, server_load=0.4)))
    assert "ca2fl" not in names(of(replace(LATE, server_load=0.6)))
    private = replace(CALM, concept_shift=True, budget=SPENDING, speed_ratio=8.0)
    assert not {"ifca", "fedsea", "fadas"} & set(names(of(private)))


def test_stragglers_with_classes_of_their_own_keep_their_weight() -> None:
    slow = replace(
        CALM, speed_ratio=8.0, stragglers=20, straggler_classes={"8": 0.9}, straggler_age=2.0
    )
    assert names(of(slow))[:2] == ["ca2fl", "aso-fed"]
    assert names(of(replace(slow, straggler_classes={})))[0] == "fedbuff"


def test_learning_rates_stay_below_where_a_strategy_breaks() -> None:
    facts = of(replace(CALM, skew=0.9))
    by_name = {s.name: s for s in suggest(diagnose(facts), facts, recipes())}
    assert by_name["fedbuff"].lr == 0.2
    assert by_name["ca2fl"].lr is None
    small = replace(facts, lr=0.05)
    assert all(s.lr is None for s in suggest(diagnose(small), small, recipes()))
    tuned = replace(facts, tuned={"fedbuff": 0.3})
    assert (
        next(s.lr for s in suggest(diagnose(tuned), tuned, recipes()) if s.name == "fedbuff") == 0.3
    )


EVERYTHING = [replace(CALM, **at) for _, _, at in SCENARIOS] + [replace(LATE, busy=True)]


@pytest.mark.parametrize("scenario", EVERYTHING)
@pytest.mark.parametrize("devices", [4, 100])
def test_all_that_is_suggested_can_be_pasted(scenario: Scenario, devices: int) -> None:
    facts = replace(of(scenario, replace(GOOD, dip=0.2)), devices=devices)
    findings = diagnose(facts)
    foreign = {"strategy": {"name": "fedasync", "alpha": 0.3}}
    for suggestion in suggest(findings, facts, recipes()):
        tree = with_settings(foreign, suggestion.settings)
        assert tree["strategy"].pop("name") == suggestion.name
        resolve_options(find_recipe(suggestion.name), tree["strategy"])
        assert suggestion.see.startswith("docs/")
    for each in change(findings, facts):
        assert with_settings({}, each.settings)


def test_a_total_budget_is_for_the_busiest_device() -> None:
    facts = of(replace(CALM, budget=SPENDING))
    (found,) = change(diagnose(facts), facts)
    assert "privacy.tasks=61" in found.settings
    assert 'privacy.sampling="poisson"' in found.settings
    within = of(replace(CALM, budget=replace(SPENDING, spent_mean=6.0, spent_max=8.0)))
    assert change(diagnose(within), within) == []


def test_the_simplest_is_known() -> None:
    assert simplicity("fedbuff") < simplicity("feddc") < simplicity("mine:own")


def test_discounting_stragglers_with_most_data_is_not_called_cheap() -> None:
    late = replace(CALM, late=60, stragglers=60, straggler_age=9.0)
    few, many = (
        next(
            f.text
            for f in diagnose(of(replace(late, straggler_share=share)))
            if f.kind == "staleness"
        )
        for share in (0.4, 0.6)
    )
    assert "costs little" in few
    assert "They hold 60% of all examples: discounting them would lose that." in many

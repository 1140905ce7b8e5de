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
from latecomer.study.advice.rules import RULES, judge
from latecomer.study.advice.wording import CALLED
from latecomer.study.config import with_settings

CALM = Scenario(devices=100, examples=50, epochs=80, age=1.0)
LATE = replace(
    CALM, late=10, behind=10, age_behind=20.0, behind_share=0.1, tied={"5": 0.9}, skew=0.94
)
GOOD = Run("fedasync", lr=0.5, chance=0.1, accuracy=0.95, dip=0.01, gain=0.0, own_mean=0.95)
SPENDING = Budget(5.0, False, 0.0, 48.0, 66.0, inf, 40.0, 61.0, False, False)


def of(scenario: Scenario | None = None, run: Run | None = None) -> Facts:
    return Facts(scenario, run, None, "fedasync", 0.5, 100)


def kinds(facts: Facts) -> list[str]:
    return [finding.kind for finding in judge(facts)]


# what is changed in a calm scenario: just below the threshold, and at it
SCENARIOS = [
    ("budget", {"budget": None}, {"budget": SPENDING}),
    ("late-data", {"tied": {"5": 0.9}, "age_behind": 3.9}, {"tied": {"5": 0.9}, "age_behind": 4.0}),
    ("late-data", {"tied": {}, "age_behind": 20.0}, {"tied": {"5": 0.9}, "age_behind": 20.0}),
    ("worlds", {"drift": "grow"}, {"drift": "shift", "contradicts": True}),
    ("availability", {"away": 0.19}, {"away": 0.2}),
    ("availability", {"unheard": 0.09}, {"unheard": 0.1}),
    ("availability", {"lost": 0.09}, {"lost": 0.1}),
    ("staleness", {"age_behind": 3.9}, {"age_behind": 4.0}),
    ("staleness", {"age_behind": 9.0, "tied": {"5": 0.9}}, {"age_behind": 9.0}),
    ("speed", {"speed_ratio": 2.9}, {"speed_ratio": 3.0}),
    ("heterogeneity", {"skew": 0.84}, {"skew": 0.85}),
    ("links", {"transfer": 0.49}, {"transfer": 0.5}),
    ("server", {"server_load": 0.49}, {"server_load": 0.5}),
    ("narrow", {"narrow": 0.0}, {"narrow": 0.1}),
]


@pytest.mark.parametrize(("kind", "below", "at"), SCENARIOS)
def test_a_rule_about_the_scenario(kind: str, below: dict, at: dict) -> None:
    assert kind not in kinds(of(replace(CALM, **below)))
    assert kind in kinds(of(replace(CALM, **at)))


RUNS = [
    ("divergence", {"accuracy": 0.16}, {"accuracy": 0.15}),
    ("divergence", {"refused": 0.04}, {"refused": 0.05}),
    ("worlds", {"own_mean": 0.6}, {"own_mean": 0.59}),
    ("worlds", {"own_mean": 0.4, "gain": 0.02}, {"own_mean": 0.4, "gain": 0.01}),
    ("worlds", {"own_mean": 0.4, "clusters": 2}, {"own_mean": 0.4}),
    ("served-worse", {"own_late": 0.91, "own_others": 0.95}, {"own_late": 0.8, "own_others": 0.95}),
    (
        "served-worse",
        {"own_rare": 0.94, "own_frequent": 0.95},
        {"own_rare": 0.5, "own_frequent": 1},
    ),
    ("swings", {"dip": 0.04}, {"dip": 0.05}),
    ("swings", {"dip": 0.2, "gain": 0.02}, {"dip": 0.2, "gain": 0.01}),
    ("waiting", {"waiting": 0.29}, {"waiting": 0.3}),
    ("lost", {"dropped": 0.09}, {"dropped": 0.1}),
    ("repair", {"repairs": None}, {"repairs": 3}),
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
    assert set(CALLED) == tried | {"nothing"}
    assert set(STRATEGIES) | set(SETTINGS) <= tried


def test_where_nothing_stands_out_that_is_said() -> None:
    (only,) = judge(of(CALM, GOOD))
    assert only.kind == "nothing"
    assert only == rules.NOTHING


def test_what_dominates_comes_first() -> None:
    assert kinds(of(replace(LATE, speed_ratio=8.0))) == ["late-data", "speed", "heterogeneity"]
    private = replace(LATE, budget=SPENDING)
    assert kinds(of(private))[0] == "budget"
    assert kinds(of(private, replace(GOOD, accuracy=0.1)))[0] == "divergence"


def test_words_carry_the_evidence() -> None:
    finding = judge(of(LATE))[0]
    assert "90% of class 5" in finding.text
    assert "20.0 epochs" in finding.text
    assert finding.evidence["share_of_5"] == 0.9


def test_nobody_late_is_said_of_speeds() -> None:
    text = judge(of(replace(CALM, speed_ratio=8.0)))[0].text
    assert "8.0 times" in text
    assert "Nobody is late" in text
    assert "Nobody is late" not in judge(of(replace(CALM, speed_ratio=8.0, late=3)))[0].text


def test_who_waits_is_named() -> None:
    facts = replace(of(replace(CALM, speed_ratio=8.0)), strategy="fedavg")
    assert "fedavg waits" in judge(facts)[0].text


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        ({"limit": 10.0, "allowed": 40.0}, "epsilon 10 allows 40 tasks"),
        ({}, "promises little"),
        ({"spent_mean": 6.0, "spent_most": 8.0}, "no budget is exceeded"),
    ],
)
def test_a_budget_is_told_by_what_it_truly_is(spent: dict, words: str) -> None:
    facts = of(replace(CALM, budget=replace(SPENDING, **spent)))
    assert words in judge(facts)[0].text


def names(facts: Facts, known: set[str] | None = None) -> list[str]:
    return [s.name for s in suggest(judge(facts), facts, known or set(recipes()) - {FLAGSHIP})]


def test_late_data_are_repaired_by_how_late_they_are() -> None:
    assert names(of(LATE))[:2] == ["feddc", "feddc-fedbuff"]
    assert names(of(replace(LATE, age_behind=9.9)))[0] == "feddc-fedbuff"
    away = suggest(judge(facts := of(replace(LATE, busy=True))), facts, recipes())
    assert {"surrogates": True} in [s.options for s in away if s.name == "feddc"]


def test_the_flagship_leads_where_it_is_registered_and_never_alone() -> None:
    known = {*recipes(), FLAGSHIP}
    for facts in (of(CALM), of(LATE), of(replace(CALM, budget=SPENDING))):
        found = names(facts, known)
        assert found[0] == FLAGSHIP
        assert 3 <= len(found) <= 5
    assert FLAGSHIP not in names(of(CALM))


def test_what_a_scenario_forbids_is_not_suggested() -> None:
    assert "ca2fl" in names(of(replace(LATE, server_load=0.4)))
    assert "ca2fl" not in names(of(replace(LATE, server_load=0.6)))
    private = replace(CALM, contradicts=True, budget=SPENDING, speed_ratio=8.0)
    assert not {"ifca", "fedsea", "fadas"} & set(names(of(private)))


def test_slow_devices_with_classes_of_their_own_keep_a_full_voice() -> None:
    slow = replace(CALM, speed_ratio=8.0, behind=20, tied={"8": 0.9}, age_behind=2.0)
    assert names(of(slow))[:2] == ["ca2fl", "aso-fed"]
    assert names(of(replace(slow, tied={})))[0] == "fedbuff"


def test_learning_rates_stay_below_where_a_strategy_breaks() -> None:
    facts = of(replace(CALM, skew=0.9))
    by_name = {s.name: s for s in suggest(judge(facts), facts, recipes())}
    assert by_name["fedbuff"].lr == 0.2
    assert by_name["ca2fl"].lr is None
    small = replace(facts, lr=0.05)
    assert all(s.lr is None for s in suggest(judge(small), small, recipes()))
    tuned = replace(facts, tuned={"fedbuff": 0.3})
    assert next(s.lr for s in suggest(judge(tuned), tuned, recipes()) if s.name == "fedbuff") == 0.3


EVERYTHING = [replace(CALM, **at) for _, _, at in SCENARIOS] + [replace(LATE, busy=True)]


@pytest.mark.parametrize("scenario", EVERYTHING)
@pytest.mark.parametrize("devices", [4, 100])
def test_all_that_is_suggested_can_be_pasted(scenario: Scenario, devices: int) -> None:
    facts = replace(of(scenario, replace(GOOD, dip=0.2)), devices=devices)
    findings = judge(facts)
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
    (found,) = change(judge(facts), facts)
    assert "privacy.tasks=61" in found.settings
    assert 'privacy.sampling="poisson"' in found.settings
    within = of(replace(CALM, budget=replace(SPENDING, spent_mean=6.0, spent_most=8.0)))
    assert change(judge(within), within) == []


def test_the_simplest_is_known() -> None:
    assert simplicity("fedbuff") < simplicity("feddc") < simplicity("mine:own")


def test_who_holds_most_of_the_data_is_not_said_to_cost_little() -> None:
    late = replace(CALM, late=60, behind=60, age_behind=9.0)
    few, many = (
        next(f.text for f in judge(of(replace(late, behind_share=share))) if f.kind == "staleness")
        for share in (0.4, 0.6)
    )
    assert "costs little" in few
    assert "They hold 60% of all examples: discounting them would lose that." in many

"""Checks of the paper's takeaways on synthetic scores."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from latecomer.study.config import Tree, merged
from latecomer.study.har.plan import Plan, make_plan
from latecomer.study.har.skew import Skew
from latecomer.study.har.takeaways import (
    AGREE,
    DISAGREE,
    INCONCLUSIVE,
    StudyResults,
    check_takeaways,
)


@pytest.fixture(scope="module")
def plan(scenario: Tree) -> Plan:
    har = {"augment": ["none", "base", "balanced"], "adam_lr": [0.01]}
    base = {"data": {"augment": "base"}, "study": {"har": har}}
    return make_plan(merged(scenario, base))


def results(
    plan: Plan, changes: dict[tuple[str, str], float], noise: float = 0.0005
) -> StudyResults:
    """Every run has the score 0.8, plus `changes` by factor and value, plus noise."""
    rng = np.random.default_rng(0)
    rows = []
    for variant in plan.variants:
        for seed in (1, 2, 3):
            score = 0.8 + changes.get((variant.factor, variant.value), 0.0) + noise * rng.normal()
            row = {"paradigm": variant.paradigm, "factor": variant.factor, "value": variant.value}
            rows.append({**row, "seed": seed, "macro_f1": score, "f1_rarest": score})
    skew = Skew({"sit": 0.2, "walk": 0.2, "run": 0.4}, np.zeros((3, 5)))
    table = pd.DataFrame(rows)
    return StudyResults(plan, (1, 2, 3), table, pd.DataFrame(), "run", skew, skew, {})


LIKE_THE_PAPER = {
    ("augment", "none"): -0.1,
    ("augment", "balanced"): -0.02,
    ("scale", "local"): -0.03,
    ("optimizer", "adam"): -0.05,
    ("server_delay", "5"): -0.04,
    ("test", "held-out-clients"): -0.2,
}


def checked(found: StudyResults) -> list[str]:
    return [check.result for check in check_takeaways(found)]


def test_results_like_the_papers(plan: Plan) -> None:
    found = check_takeaways(results(plan, LIKE_THE_PAPER))
    assert [check.number for check in found] == [1, 2, 3, 4, 5, 6]
    assert [check.result for check in found] == [AGREE] * 6
    assert "more in the minority" in found[3].numbers
    assert "base minus none, asynchronous: +0.1" in found[1].numbers


def test_results_unlike_the_papers(plan: Plan) -> None:
    opposite = {key: -value for key, value in LIKE_THE_PAPER.items()}
    found = checked(results(plan, opposite))
    assert found[1] == found[2] == found[4] == found[5] == DISAGREE


def test_no_gain_at_all_refutes_a_gain(plan: Plan) -> None:
    assert checked(results(plan, {}))[2] == DISAGREE


def test_noise_is_inconclusive(plan: Plan) -> None:
    found = checked(results(plan, LIKE_THE_PAPER, noise=1.0))
    assert found[1:3] == [INCONCLUSIVE] * 2
    assert found[4:] == [INCONCLUSIVE] * 2


def test_a_class_absent_from_the_test_set_is_enough(plan: Plan) -> None:
    found = check_takeaways(replace(results(plan, {}), absent={"held-out-clients": ["run"]}))
    assert found[0].result == AGREE
    assert "absent from a held-out test set: run" in found[0].numbers


def test_features_without_skew_disagree(plan: Plan) -> None:
    even = Skew({"sit": 0.0, "walk": 0.01, "run": 0.01}, np.zeros((3, 5)))
    assert checked(replace(results(plan, {}), skew=even))[3] == DISAGREE


def test_the_strategy_of_the_paper_decides_on_busy_servers(scenario: Tree) -> None:
    other = {"strategy": {"name": "fedasync"}, "study": {"har": {"strategies": ["async-share"]}}}
    plan = make_plan(merged(scenario, other))
    found = check_takeaways(results(plan, {("server_delay", "5"): -0.5}))
    assert found[5].result == DISAGREE
    assert "loss with fedasync, 5 s: +0.5" in found[5].numbers
    assert checked(results(plan, {("busy", "async-share"): -0.5}))[5] == AGREE

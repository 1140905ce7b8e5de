"""Verdicts on made-up results."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from latecomer.study.config import Tree, merged
from latecomer.study.har.plan import Plan, make_plan
from latecomer.study.har.skew import Skew
from latecomer.study.har.takeaways import AGREE, CANNOT_TELL, DISAGREE, Evidence, verdicts


@pytest.fixture(scope="module")
def plan(scenario: Tree) -> Plan:
    har = {"augment": ["none", "base", "balanced"], "adam_lr": [0.01]}
    base = {"data": {"augment": "base"}, "study": {"har": har}}
    return make_plan(merged(scenario, base))


def evidence(plan: Plan, changes: dict[tuple[str, str], float], noise: float = 0.0005) -> Evidence:
    """Every run at 0.8, but for those that are changed."""
    rng = np.random.default_rng(0)
    rows = []
    for variant in plan.variants:
        for seed in (1, 2, 3):
            score = 0.8 + changes.get((variant.factor, variant.value), 0.0) + noise * rng.normal()
            row = {"paradigm": variant.paradigm, "factor": variant.factor, "value": variant.value}
            rows.append({**row, "seed": seed, "macro_f1": score, "f1_rarest": score})
    skew = Skew({"sit": 0.2, "walk": 0.2, "run": 0.4}, np.zeros((3, 5)), {})
    return Evidence(plan, pd.DataFrame(rows), "run", skew, skew, {})


LIKE_THE_PAPER = {
    ("augment", "none"): -0.1,
    ("augment", "balanced"): -0.02,
    ("scale", "local"): -0.03,
    ("optimizer", "adam"): -0.05,
    ("server_delay", "5"): -0.04,
    ("test", "held-out-clients"): -0.2,
}


def judged(found: Evidence) -> list[str]:
    return [verdict.verdict for verdict in verdicts(found)]


def test_results_like_the_papers(plan: Plan) -> None:
    found = verdicts(evidence(plan, LIKE_THE_PAPER))
    assert [v.number for v in found] == [1, 2, 3, 4, 5, 6]
    assert [v.verdict for v in found] == [AGREE] * 6
    assert "more in the minority" in found[3].numbers
    assert "base minus none, asynchronous: +0.1" in found[1].numbers


def test_results_unlike_the_papers(plan: Plan) -> None:
    opposite = {key: -value for key, value in LIKE_THE_PAPER.items()}
    verdict = judged(evidence(plan, opposite))
    assert verdict[1] == verdict[2] == verdict[4] == verdict[5] == DISAGREE


def test_no_gain_at_all_refutes_a_gain(plan: Plan) -> None:
    assert judged(evidence(plan, {}))[2] == DISAGREE


def test_noise_cannot_tell(plan: Plan) -> None:
    verdict = judged(evidence(plan, LIKE_THE_PAPER, noise=1.0))
    assert verdict[1:3] == [CANNOT_TELL] * 2
    assert verdict[4:] == [CANNOT_TELL] * 2


def test_a_class_missing_from_the_test_set_is_enough(plan: Plan) -> None:
    found = replace(evidence(plan, {}), missing={"held-out-clients": ["run"]})
    assert verdicts(found)[0].verdict == AGREE
    assert "absent from a held-out test set: run" in verdicts(found)[0].numbers


def test_alike_features_disagree(plan: Plan) -> None:
    even = Skew({"sit": 0.0, "walk": 0.01, "run": 0.01}, np.zeros((3, 5)), {})
    assert judged(replace(evidence(plan, {}), skew=even))[3] == DISAGREE


def test_the_papers_own_strategy_decides_on_busy_servers(scenario: Tree) -> None:
    other = {"strategy": {"name": "fedasync"}, "study": {"har": {"strategies": ["async-share"]}}}
    plan = make_plan(merged(scenario, other))
    found = evidence(plan, {("server_delay", "5"): -0.5})
    assert judged(found)[5] == DISAGREE
    assert "loss with fedasync, 5 s: +0.5" in verdicts(found)[5].numbers
    assert judged(evidence(plan, {("busy", "async-share"): -0.5}))[5] == AGREE

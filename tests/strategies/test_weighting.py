"""Hand-worked weights."""

import math

import pytest
import torch

from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.parts.weighting import constant, hinge, polynomial, sigmoid
from latecomer.strategies.recipe import build_strategy


def stale(staleness: int, examples: int = 10) -> Contribution:
    zero = torch.zeros(1)
    task = Task(0, 0, 0, "main", 0, TrainSpec(), zero)
    return Contribution(task, Update(0, zero, examples), zero, zero, "main", staleness)


def test_fedasync_alpha_06_p_05_staleness_3_is_03_however_often():
    weigh = fedasync(alpha=0.6, decay="polynomial", p=0.5).weigh
    assert [weigh(stale(3), None) for _ in range(5)] == pytest.approx([0.3] * 5)


@pytest.mark.parametrize(
    ("decay", "staleness", "expected"),
    [
        (constant(), 99, 1.0),
        (polynomial(0.5), 0, 1.0),
        (polynomial(0.5), 3, 0.5),
        (polynomial(1.0), 4, 0.2),
        (hinge(10.0, 4.0), 4, 1.0),
        (hinge(10.0, 4.0), 5, 1 / 11),
        (hinge(0.5, 4.0), 6, 0.5),
        (sigmoid(0.25, 10.0), 10, 0.5),
        (sigmoid(0.25, 10.0), 0, 1 / (1 + math.exp(-2.5))),
        (sigmoid(0.25, 10.0), 40, 1 / (1 + math.exp(7.5))),
        (sigmoid(0.25, 10.0), 10**9, 0.0),
    ],
)
def test_decays(decay, staleness, expected):
    assert decay(staleness) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decay", [polynomial(0.3), hinge(0.1, 2.0), sigmoid(0.25, 10.0)])
def test_no_decay_exceeds_one_or_rises(decay):
    values = [decay(staleness) for staleness in range(200)]
    assert max(values) <= 1.0
    assert values == sorted(values, reverse=True)


def test_fedbuff_discounts_by_one_over_root_of_one_plus_staleness():
    weigh = fedbuff().weigh
    assert weigh(stale(8), None) == pytest.approx(1 / 3)


def test_weighted_multiplies_examples_by_the_sigmoid():
    assert build_strategy("weighted").weigh(stale(10, examples=40), None) == pytest.approx(20.0)

"""How far the outputs of a model are moved, by hand."""

import math

import pytest
import torch

from latecomer.strategies.latecomer.calibration import (
    MAX_SHIFT,
    LabelReport,
    bias_shift,
    label_skew,
)

ALL = torch.ones(2, dtype=torch.float64)


def judged(share, soft=None, sway=None, examples=100.0):
    soft, sway = share if soft is None else soft, [0.2] * len(share) if sway is None else sway
    return LabelReport(
        examples, *(torch.tensor(v, dtype=torch.float64) for v in (soft, share, sway))
    )


def test_unevenness_by_hand():
    apart = [judged([1.0, 0.0]), judged([0.0, 1.0])]
    assert label_skew(apart).tolist() == pytest.approx([1.0, 1.0])
    assert label_skew([judged([0.7, 0.3])] * 2).tolist() == [0.0, 0.0]
    # A quarter of each would have to move, half would be the most. Of a hundred throws of a coin,
    # heads fall short of half by 51 * C(100, 51) / 2^101 / 100 on average, beside 0.25, and of
    # the mean of two such by sqrt(1 / 2) of that.
    found = label_skew([judged([0.75, 0.25]), judged([0.25, 0.75])])
    chance = math.sqrt(1 / 2) * 51 * math.comb(100, 51) / 2**101 / 100 / 0.25
    assert found.tolist() == pytest.approx([(0.5 - chance) / (1 - chance)] * 2)


def test_one_class_can_be_uneven_among_others():
    """One device of four has the second class, and makes up for it by the first."""
    shares = [[0.1, 0.4, 0.5], *[[0.5, 0.0, 0.5]] * 3]
    found = label_skew([judged(share, examples=1e12) for share in shares])
    # Three quarters of the second would have to move, 0.9 would be the most.
    assert found.tolist() == pytest.approx([0.75 / 4 / 0.6, 0.75 / 0.9, 0.0], abs=1e-5)


def test_what_comes_of_few_examples_is_not_uneven():
    rng = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = [torch.multinomial(chances, 20, True, generator=rng) for _ in range(300)]
    shares = [torch.bincount(labels, minlength=4) / 20 for labels in drawn]
    found = label_skew([judged(share.tolist(), examples=20.0) for share in shares])
    assert found.max() < 0.1
    assert label_skew([judged(s, examples=1.0) for s in ([1.0, 0.0], [0.0, 1.0])]).max() == 0.0


def test_one_class_only_is_not_uneven():
    assert label_skew([judged([1.0, 0.0]), judged([1.0, 0.0])]).tolist() == [0.0, 0.0]


def test_offsets_by_hand():
    one = judged([1.0, 0.0], soft=[0.8, 0.2], sway=[0.16, 0.16], examples=50.0)
    other = judged([0.0, 1.0], soft=[0.4, 0.6], sway=[0.24, 0.24], examples=50.0)
    # It lacks (-0.2 + 0.4) / 2 = 0.1 of the second class, and the other way round; one nat gives
    # 0.2, and five examples of a hundred hold against it: 0.1 / (0.2 + 0.05), and half of that
    # because what one class gains the other loses.
    assert bias_shift([one, other], ALL).tolist() == pytest.approx([-0.2, 0.2])


def test_one_class_is_moved_alone():
    """Of three classes the first two are said too often and too seldom; the third as it is."""
    told = [judged([0.2, 0.5, 0.3], soft=[0.5, 0.2, 0.3], sway=[0.2] * 3, examples=50.0)] * 2
    only = [torch.tensor([float(k == j) for j in range(3)]).double() for k in range(3)]
    # It lacks 0.3 of the second; one nat gives 0.2, and five examples of a hundred hold against it.
    assert bias_shift(told, only[0]).tolist() == pytest.approx([-1.2, 0.0, 0.0])
    assert bias_shift(told, 0.5 * only[1]).tolist() == pytest.approx([0.0, 0.6, 0.0])
    assert bias_shift(told, only[2]).tolist() == [0.0, 0.0, 0.0]  # whatever the others lack
    # All together: two thirds of that each, since what one gains the others lose.
    found = bias_shift(told, torch.ones(3).double())
    assert found.tolist() == pytest.approx([-0.8, 0.8, 0.0])


def test_the_gap_is_closed():
    """Devices with one of two classes each, and a model whose first output is one nat too high."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(4000) % 2
    logits = torch.randn(4000, 2, generator=rng, dtype=torch.float64)
    logits[torch.arange(4000), labels] += 1.0  # it knows something
    logits[:, 0] += 1.0

    def lack(offset):
        p = (logits + offset).softmax(1)
        return [
            LabelReport(
                2000.0, p[rows].mean(0), torch.eye(2).double()[k], (p[rows] * (1 - p[rows])).mean(0)
            )
            for k in (0, 1)
            for rows in [labels == k]
        ]

    def gap(judged):
        return sum((each.share - each.soft)[0].item() for each in judged) / 2

    found = lack(torch.zeros(2))
    assert gap(found) < -0.1
    assert abs(gap(lack(bias_shift(found, ALL)))) < 0.1 * abs(gap(found))


def test_a_model_that_says_each_class_as_often_as_it_is_stays():
    assert bias_shift([judged([1.0, 0.0]), judged([0.0, 1.0])], ALL).tolist() == [0.0, 0.0]


def test_nothing_moves_too_far():
    classes = torch.eye(10).tolist()
    never = [judged(s, soft=classes[0], sway=[0.0] * 10) for s in classes]
    found = bias_shift(never, torch.ones(10).double())
    assert found[0] == -MAX_SHIFT
    assert 0 < found[1:].min() <= found[1:].max() <= MAX_SHIFT


def test_nobody_counts_for_more_than_two():
    honest = [judged(s) for s in ([1.0, 0.0], [0.0, 1.0])] * 10
    loud = [
        bias_shift([*honest, judged([1.0, 0.0], soft=[0.0, 1.0], examples=n)], ALL)
        .abs()
        .max()
        .item()
        for n in (1e3, 1e9)
    ]
    assert loud[0] == pytest.approx(loud[1])

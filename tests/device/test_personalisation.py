"""What a device makes of a model for itself, by hand."""

import math

import pytest
import torch

from latecomer.device.personalisation import (
    TRIED,
    TRUST,
    class_prior_offset,
    interpolated_params,
    prior_corrected_logits,
    training_errors,
)


def test_a_class_that_is_frequent_here_gains_the_log_of_its_share():
    """A hundred examples of one class among two: hardly any trust is left in the usual mix."""
    least = TRUST[0] / 2
    given = 100 + TRUST[0]
    expected = [math.log(2 * (100 + least) / given), math.log(2 * least / given)]
    assert class_prior_offset(torch.zeros(100, dtype=torch.int64), 2).tolist() == pytest.approx(
        expected
    )


def test_trust_is_what_makes_the_examples_likeliest():
    """Three and one of two classes: the odds of Dirichlet(t/2, t/2) are largest for much trust."""

    def likelihood(t):
        a = t / 2
        return a * (a + 1) * (a + 2) * a / (t * (t + 1) * (t + 2) * (t + 3))

    trust = max(TRUST, key=likelihood)
    found = class_prior_offset(torch.tensor([0, 0, 0, 1]), 2)
    shares = [(3 + trust / 2) / (4 + trust), (1 + trust / 2) / (4 + trust)]
    assert found.tolist() == pytest.approx([math.log(2 * s) for s in shares], rel=1e-5)


def test_what_the_model_expects_anyway_changes_nothing():
    labels = torch.tensor([0] * 30 + [1] * 10)
    offset = class_prior_offset(labels, 2, torch.tensor([0.75, 0.25]))
    assert offset.abs().max() < 1e-6


def test_a_mix_like_any_other_by_chance_changes_next_to_nothing():
    labels = torch.randint(0, 10, (36,), generator=torch.Generator().manual_seed(0))
    assert class_prior_offset(labels, 10).abs().max() < 0.05


def test_a_class_that_a_model_never_says_gains_a_bounded_lot():
    offset = class_prior_offset(torch.ones(5, dtype=torch.int64), 2, torch.tensor([1.0, 0.0]))
    assert offset.isfinite().all()
    assert offset[1] > offset[0]


def test_even_classes_change_no_prediction():
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    ours = prior_corrected_logits(logits, torch.arange(4).repeat(3), mix=1.0)
    assert torch.equal(ours.argmax(1), logits.argmax(1))


def test_a_doubtful_example_goes_to_the_class_of_the_house():
    logits = torch.tensor([[0.0, 0.1]])
    assert prior_corrected_logits(logits, torch.tensor([0, 0, 0]), mix=1.0).argmax() == 0
    assert prior_corrected_logits(logits, torch.tensor([0, 0, 0]), mix=0.0) is logits


def to(goal):
    return lambda params: (params[0] - goal).abs().item()


@pytest.mark.parametrize(
    ("keep", "goal", "found"),
    [
        (1.0, 9.0, [5.0, 0.0]),  # all of it is not enough
        (1.0, 3.1, [3.0, 1.0]),
        (1.0, 1.9, [2.0, 1.5]),
        (1.0, 0.0, [1.0, 2.0]),  # it would do harm
        (0.5, 9.0, [3.0, 1.0]),
        (0.5, 1.4, [1.5, 1.75]),
    ],
)
def test_as_much_of_the_own_change_is_kept_as_serves_the_device(keep, goal, found):
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated_params(params, change, keep, to(goal)).tolist() == found


def test_what_serves_it_no_better_is_not_kept():
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated_params(params, change, 1.0, lambda params: 3) is params


def test_without_a_change_the_model_is_as_it_was_sent():
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated_params(params, change, 0.0, to(9.0)) is params
    assert interpolated_params(params, None, 0.5, to(9.0)) is params
    assert (
        interpolated_params(params, torch.ones(1), 0.5, to(9.0)) is params
    )  # of a narrower network


def test_errors_are_of_the_own_examples_with_the_own_offset():
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.2, 0.0]]), torch.tensor([0, 1, 1])
    assert training_errors(torch.mul, x, y, 0.0)(torch.ones(1)) == 1
    assert training_errors(torch.mul, x, y, torch.tensor([0.0, 0.5]))(torch.ones(1)) == 0
    assert training_errors(torch.mul, x, y, 0.0)(torch.tensor([math.inf])) == 3  # it has diverged
    assert training_errors(torch.mul, x[:0], y[:0], 0.0)(torch.ones(1)) == 0


def test_a_device_with_many_examples_tries_some_of_them():
    asked = []

    def logits(params, x):
        asked.append(x)
        return torch.stack([x, -x], 1)

    errors = training_errors(
        logits, torch.arange(1000.0), torch.zeros(1000, dtype=torch.int64), 0.0
    )
    assert errors(torch.zeros(1)) == errors(torch.zeros(1)) == 0
    assert len(asked[0]) == TRIED
    assert torch.equal(asked[0], asked[1])

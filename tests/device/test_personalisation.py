"""Label-shift correction and interpolation with the last update, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.messages import ServingSettings
from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import (
    MAX_EXAMPLES,
    PRIOR_WEIGHTS,
    interpolated,
    output_bias,
    personalise,
    prior_shift,
    training_errors,
)


def test_a_class_that_is_frequent_here_gains_the_log_of_its_share():
    """A hundred examples of one class among two: hardly any trust is left in the usual mix."""
    least = PRIOR_WEIGHTS[0] / 2
    given = 100 + PRIOR_WEIGHTS[0]
    expected = [math.log(2 * (100 + least) / given), math.log(2 * least / given)]
    assert prior_shift(torch.zeros(100, dtype=torch.int64), 2).tolist() == pytest.approx(expected)


def test_trust_is_what_makes_the_examples_likeliest():
    """Three and one of two classes: the odds of Dirichlet(t/2, t/2) are largest for much trust."""

    def likelihood(t):
        a = t / 2
        return a * (a + 1) * (a + 2) * a / (t * (t + 1) * (t + 2) * (t + 3))

    trust = max(PRIOR_WEIGHTS, key=likelihood)
    found = prior_shift(torch.tensor([0, 0, 0, 1]), 2)
    shares = [(3 + trust / 2) / (4 + trust), (1 + trust / 2) / (4 + trust)]
    assert found.tolist() == pytest.approx([math.log(2 * s) for s in shares], rel=1e-5)


def test_what_the_model_expects_anyway_changes_nothing():
    labels = torch.tensor([0] * 30 + [1] * 10)
    offset = prior_shift(labels, 2, torch.tensor([0.75, 0.25]))
    assert offset.abs().max() < 1e-6


def test_a_mix_like_any_other_by_chance_changes_next_to_nothing():
    labels = torch.randint(0, 10, (36,), generator=torch.Generator().manual_seed(0))
    assert prior_shift(labels, 10).abs().max() < 0.05


def test_the_correction_of_a_class_that_the_model_never_predicts_is_bounded():
    offset = prior_shift(torch.ones(5, dtype=torch.int64), 2, torch.tensor([1.0, 0.0]))
    assert offset.isfinite().all()
    assert offset[1] > offset[0]


def test_a_balanced_device_corrects_no_prediction():
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    bias = output_bias(ServingSettings(prior_correction=1.0), torch.arange(4).repeat(3), 4)
    assert torch.equal((logits + bias).argmax(1), logits.argmax(1))


def test_the_output_bias_is_that_of_the_settings_plus_the_scaled_correction():
    labels, prior = torch.tensor([0, 0, 0]), (0.25, 0.75)
    shift = prior_shift(labels, 2, torch.tensor(prior, dtype=torch.float64))
    settings = ServingSettings(0.0, 0.5, prior, (1.0, -2.0))
    found = output_bias(settings, labels, 2)
    assert torch.equal(found, torch.tensor([1.0, -2.0]) + 0.5 * shift)
    assert found[0] > 1.0
    assert output_bias(replace(settings, prior_correction=0.0), labels, 2).tolist() == [1.0, -2.0]
    assert output_bias(ServingSettings(), labels, 2).tolist() == [0.0, 0.0]


def test_a_prior_and_a_bias_of_another_number_of_classes_are_ignored():
    labels = torch.tensor([0, 0, 0])
    settings = ServingSettings(0.0, 1.0, (0.2, 0.3, 0.5), (9.0,))
    assert torch.equal(output_bias(settings, labels, 2), prior_shift(labels, 2))


NONE = torch.zeros(2)


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
def test_the_share_of_the_update_with_the_fewest_errors_is_added(keep, goal, found):
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated(params, change, keep, to(goal)).tolist() == found


def test_an_update_without_fewer_errors_is_left_out():
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated(params, change, 1.0, lambda params: 3) is params


def test_without_an_update_of_this_size_the_parameters_are_returned():
    params, change = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert interpolated(params, change, 0.0, to(9.0)) is params
    assert interpolated(params, None, 0.5, to(9.0)) is params
    assert interpolated(params, torch.ones(1), 0.5, to(9.0)) is params  # of a narrower network


def test_errors_are_counted_with_the_output_bias():
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.2, 0.0]]), torch.tensor([0, 1, 1])
    assert training_errors(torch.mul, x, y, NONE)(torch.ones(1)) == 1
    assert training_errors(torch.mul, x, y, torch.tensor([0.0, 0.5]))(torch.ones(1)) == 0
    assert training_errors(torch.mul, x, y, NONE)(torch.tensor([math.inf])) == 3  # it has diverged
    assert training_errors(torch.mul, x[:0], y[:0], NONE)(torch.ones(1)) == 0


def test_errors_are_counted_on_a_fixed_subsample():
    asked = []

    def logits(params, x):
        asked.append(x)
        return torch.stack([x, -x], 1)

    errors = training_errors(
        logits, torch.arange(1000.0), torch.zeros(1000, dtype=torch.int64), NONE
    )
    assert errors(torch.zeros(1)) == errors(torch.zeros(1)) == 0
    assert len(asked[0]) == MAX_EXAMPLES
    assert torch.equal(asked[0], asked[1])


LINEAR = FlatModel(lambda: nn.Linear(1, 2), (1,), 2)  # parameters: two weights, two biases


def test_personalisation_by_hand():
    """Classes at x = -1 and x = 1, a model that predicts class 0 only, an update to class 1.

    Labels are balanced and the class prior is uniform: the label-shift correction is 0.
    """
    x, y = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1])
    params = torch.tensor([0.0, 0.0, 4.0, 0.0])  # logits (4, 0)
    update = torch.tensor([0.0, 8.0, 0.0, 16.0])  # of the second class: 8 x + 16
    settings = ServingSettings(0.5, 1.0, (0.5, 0.5), (1.0, 0.0))

    def found(settings, update=update):
        return personalise(LINEAR, params, settings, update, x, y)

    # Of s / 2 of the update class 1 has 12 s at x = 1 and 4 s at x = -1. Class 0 has 5, 4, 2.5.
    assert found(settings).output_bias.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert found(settings).params.tolist() == [0.0, 2.0, 4.0, 4.0]  # s = 0.5: 6 and 2
    assert found(replace(settings, output_bias=())).params.tolist() == [0.0, 2.0, 4.0, 4.0]
    lower = replace(settings, output_bias=(-1.5, 0.0))
    assert found(lower).params.tolist() == [0.0, 1.0, 4.0, 2.0]  # s = 0.25: 3 and 1
    assert found(replace(settings, interpolation=0.0)).params is params
    assert found(settings, None).params is params

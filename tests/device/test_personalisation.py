"""Label-shift correction and fine-tuning on a device, by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.messages import ServingSettings, TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import (
    FINETUNE_SEED,
    PRIOR_WEIGHTS,
    output_bias,
    personalise,
    prior_shift,
)
from latecomer.device.training import average_loss, local_update, plan_batches


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
    bias = output_bias(ServingSettings(prior=True), torch.arange(4).repeat(3), 4)
    assert torch.equal((logits + bias).argmax(1), logits.argmax(1))


def test_the_output_bias_is_the_correction_if_the_settings_ask_for_it():
    labels, prior = torch.tensor([0, 0, 0]), (0.25, 0.75)
    settings = ServingSettings(True, 0, prior)
    shift = prior_shift(labels, 2, torch.tensor(prior, dtype=torch.float64))
    assert torch.equal(output_bias(settings, labels, 2), shift)
    assert shift[0] > 0.0
    assert output_bias(replace(settings, prior=False), labels, 2).tolist() == [0.0, 0.0]


def test_the_correction_with_a_given_class_prior_by_hand():
    """20 examples of class 1, which the model expects in a quarter of all cases.

    One class only is likeliest with the least weight t = 0.1 of the prior: p_device is
    (20 + 0.1 / 4) / 20.1 for class 1 and 0.075 / 20.1 for class 0.
    """
    settings = ServingSettings(prior=True, class_prior=(0.75, 0.25))
    found = output_bias(settings, torch.ones(20, dtype=torch.int64), 2)
    by_hand = [math.log(0.075 / 20.1 / 0.75), math.log(20.025 / 20.1 / 0.25)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-5)
    assert found.tolist() == pytest.approx([-5.30330, 1.38256], abs=1e-4)


def test_a_prior_of_another_number_of_classes_is_ignored():
    labels = torch.tensor([0, 0, 0])
    settings = ServingSettings(True, 0, (0.2, 0.3, 0.5))
    assert torch.equal(output_bias(settings, labels, 2), prior_shift(labels, 2))


LINEAR = FlatModel(lambda: nn.Linear(1, 2), (1,), 2)  # parameters: two weights, two biases
PARAMS = torch.tensor([0.0, 0.0, 4.0, 0.0])  # logits (4, 0)
X, Y = torch.tensor([[-1.0], [-1.0], [1.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1, 1])
SPEC = TrainSpec(local_epochs=7, batch_size=2, lr=0.5)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fine_tuning_is_local_training_in_a_fixed_order(epochs, optimizer):
    spec = replace(SPEC, optimizer=optimizer)
    settings = ServingSettings(finetune_epochs=epochs)
    found = personalise(LINEAR, PARAMS, settings, spec, X, Y)
    short = replace(spec, local_epochs=epochs)
    plan = plan_batches(5, short, torch.Generator().manual_seed(FINETUNE_SEED))
    assert torch.equal(found.params, local_update(LINEAR, PARAMS, X, Y, short, plan))
    assert found.output_bias.tolist() == [0.0, 0.0]
    assert average_loss(LINEAR, found.params, X, Y) < average_loss(LINEAR, PARAMS, X, Y)
    assert PARAMS.tolist() == [0.0, 0.0, 4.0, 0.0]
    again = personalise(LINEAR, PARAMS, settings, spec, X, Y)
    assert torch.equal(again.params, found.params)


def test_one_step_of_fine_tuning_by_hand():
    """One example x = 1 of class 1, logits (0, 0): the gradient of the logits is (1/2, -1/2)."""
    x, y = torch.tensor([[1.0]]), torch.tensor([1])
    spec = TrainSpec(local_epochs=5, batch_size=4, lr=0.5, momentum=0.0)
    found = personalise(LINEAR, torch.zeros(4), ServingSettings(finetune_epochs=1), spec, x, y)
    assert found.params.tolist() == [-0.25, 0.25, -0.25, 0.25]


def test_fine_tuning_trains_every_layer_without_clipping_and_proximal_term():
    """They protect what is sent or keep clients together; a fine-tuned model does neither."""
    settings = ServingSettings(finetune_epochs=2)
    plain = personalise(LINEAR, PARAMS, settings, SPEC, X, Y).params
    limited = replace(SPEC, last_layer_only=True, prox=10.0, clip=1e-3)
    assert torch.equal(personalise(LINEAR, PARAMS, settings, limited, X, Y).params, plain)


@pytest.mark.parametrize("prior", [False, True])
def test_without_epochs_or_examples_the_parameters_are_returned(prior):
    settings = ServingSettings(prior)
    assert personalise(LINEAR, PARAMS, settings, SPEC, X, Y).params is PARAMS
    found = personalise(LINEAR, PARAMS, replace(settings, finetune_epochs=3), SPEC, X[:0], Y[:0])
    assert found.params is PARAMS
    assert found.output_bias.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)

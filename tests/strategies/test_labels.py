"""Labels read off the output layer."""

import pytest
import torch
from torch import nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts.labels import allocate_labels, label_shares, output_bias

LINEAR = FlatModel(lambda: nn.Linear(2, 2), (2,), 2)


def test_the_bias_tells_the_share_of_each_class():
    """From zero weights both classes are predicted at 1/2; labels 0, 0, 0, 1 are 3/4 and 1/4.

    One step of 0.1 then moves the bias by 0.1 * (3/4 - 1/2) = 0.025 up and down.
    """
    base, delta = torch.zeros(6), torch.tensor([0.0, 0, 0, 0, 0.025, -0.025])
    shares = label_shares(LINEAR, base, delta, torch.zeros(4, 2), rate=0.1)
    # Afterwards the prediction is softmax(0.025, -0.025) = (0.5125, 0.4875): the middle counts.
    assert shares.tolist() == pytest.approx([0.25 + 0.50625, -0.25 + 0.49375], abs=1e-4)


def test_a_class_without_evidence_is_not_there():
    delta = torch.tensor([0.0, 0, 0, 0, 0.05, -0.05])
    shares = label_shares(LINEAR, torch.zeros(6), delta, torch.zeros(4, 2), rate=0.1)
    assert shares.tolist() == [1.0, 0.0]


def test_without_a_bias_nothing_can_be_told():
    plain = FlatModel(lambda: nn.Linear(2, 2, bias=False), (2,), 2)
    assert output_bias(plain) is None
    assert label_shares(plain, torch.zeros(4), torch.ones(4), torch.zeros(1, 2), 0.1) is None


@pytest.mark.parametrize(
    ("shares", "size", "labels", "weights"),
    [
        ([0.75, 0.25], 4, [0, 0, 0, 1], [0.25] * 4),
        ([0.97, 0.03], 4, [0, 0, 0, 1], [0.97 / 3] * 3 + [0.03]),
        ([0.0, 1.0], 2, [1, 1], [0.5, 0.5]),
        ([0.5, 0.3, 0.2], 2, [0, 1], [0.5, 0.3]),
    ],
)
def test_labels_are_spread_in_proportion(shares, size, labels, weights):
    found, logits = allocate_labels(torch.tensor(shares), size)
    assert found.tolist() == labels
    assert logits.exp().tolist() == pytest.approx(weights)


@pytest.mark.parametrize(("name", "shape"), [("mlp", (12,)), ("lenet", (1, 8, 8))])
def test_labels_of_real_training_are_found(name, shape):
    model = flat_model(name, shape, 4)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, *shape, generator=rng), torch.tensor([0] * 30 + [2] * 10)
    spec = TrainSpec(local_epochs=5, batch_size=40, lr=0.01)
    base = model.init(1)
    delta = local_update(model, base, x, y, spec, plan_batches(40, spec, task_rng(0, 0, 0))) - base
    # Five steps with momentum 1/2: each gradient counts 1, 1.5, 1.75, 1.875, 1.9375 times.
    shares = label_shares(model, base, delta, torch.randn(32, *shape, generator=rng), 0.01 * 8.0625)
    assert shares.tolist() == pytest.approx([0.75, 0, 0.25, 0], abs=0.06)

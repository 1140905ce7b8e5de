"""Gradient inversion: hand-worked programs, and estimates held against the truth."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.codec import decode, encode
from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts.inversion import (
    Effort,
    InversionTarget,
    effective_rate,
    inversion_program,
    invert,
    local_steps,
    misfit,
    replay,
    top_mask,
)

SPEC = TrainSpec(local_epochs=5, batch_size=40, lr=0.05, momentum=0.5)
QUICK = Effort(samples=8, iterations=20)


class Device:
    """Examples of one class, and what training on them does to a model."""

    def __init__(self, model, seed=0, count=20, label=1, spec=SPEC):
        rng = torch.Generator().manual_seed(seed)
        self.model, self.spec, self.count = model, spec, count
        self.x = torch.randn(count, *model.input_shape, generator=rng) + 0.5
        self.y = torch.full((count,), label)

    def delta(self, base):
        plan = plan_batches(self.count, self.spec, task_rng(0, 0, 0))
        return local_update(self.model, base, self.x, self.y, self.spec, plan) - base

    def sought(self, base, seed=0, start=None):
        return InversionTarget(base, self.delta(base), self.spec, self.count, seed, start)


def moved_on(model, base, spec=SPEC):
    """A later model: trained by others, on another class."""
    other = Device(model, seed=9, label=0, spec=spec)
    for _ in range(8):
        base = base + other.delta(base)
    return base


def test_local_steps():
    assert local_steps(TrainSpec(local_epochs=3, batch_size=10), 25) == 9
    assert local_steps(TrainSpec(local_epochs=3, batch_size=10), 4) == 3


def test_effective_rate_counts_what_momentum_repeats():
    # The gradients of three steps are added 1.75, 1.5 and 1 times.
    assert effective_rate(TrainSpec(lr=0.1, momentum=0.5), 3) == pytest.approx(0.425)
    assert effective_rate(TrainSpec(lr=0.1, momentum=0.0), 3) == pytest.approx(0.3)
    assert effective_rate(TrainSpec(lr=0.1, momentum=0.5, optimizer="adam"), 3) == pytest.approx(
        0.3
    )


def test_fewer_surrogate_steps_are_longer():
    spec = TrainSpec(local_epochs=3, batch_size=10, lr=0.1, momentum=0.5)
    assert inversion_program(spec, 10, 50) == (spec, 3)
    shorter, steps = inversion_program(spec, 10, 2)
    assert steps == 2
    assert shorter.lr_scale == pytest.approx(4.25 / 2.5)
    assert effective_rate(shorter, 2) == pytest.approx(effective_rate(spec, 3))


def test_size_rules():
    assert Effort(samples=32).size(1000) == 32
    assert Effort(share=1 / 16).size(100) == 7
    assert Effort(share=1 / 2).size(1) == 1
    assert Effort(share=1 / 2).size(10**9) == 256


def test_the_mask_keeps_the_largest():
    delta = torch.tensor([[1.0, -5.0, 2.0, 0.0], [0.0, 0.0, 0.1, -0.2]])
    assert top_mask(delta, 0.5).tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert top_mask(delta, 1.0) is None


def test_misfit():
    assert misfit(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -3.0])) == 0.75
    assert misfit(torch.zeros(2), torch.tensor([1.0, -3.0])) == 1.0
    assert misfit(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize(
    ("name", "shape", "ahead"),
    [
        ("mlp", (10,), 0.7),
        ("cnn1d", (3, 24), 0.7),
        ("lenet", (1, 8, 8), 0.7),
    ],
)
def test_an_estimate_is_closer_to_the_truth_than_the_stale_update(name, shape, ahead):
    model = flat_model(name, shape, 3)
    device, base = Device(model), model.init(2)
    now = moved_on(model, base)
    (found,) = invert(model, [device.sought(base)], QUICK)
    truth = device.delta(now)
    stale, fresh = misfit(device.delta(base), truth), misfit(replay(model, now, found), truth)
    assert found.fit < 0.35
    assert fresh < ahead * stale


def test_resnet18_and_images_are_inverted():
    model = flat_model("resnet18", (3, 8, 8), 3, width=0.125)
    device = Device(model, count=4, spec=replace(SPEC, local_epochs=1, lr=0.01))
    (found,) = invert(model, [device.sought(model.init(0))], Effort(samples=2, iterations=6))
    assert found.x.shape == (2, 3, 8, 8)
    assert found.fit < 0.9


def test_a_network_without_an_output_bias_learns_soft_labels():
    def build():
        return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3, bias=False))

    model = FlatModel(build, (10,), 3)
    device, base = Device(model), model.init(2)
    (found,) = invert(model, [device.sought(base)], Effort(samples=8, iterations=60))
    assert found.labels.shape == (8, 3)
    assert found.fit < 0.35
    # Class 1 is the only one there is.
    assert torch.softmax(found.labels, 1).mean(0).argmax() == 1


class Fussy(nn.Module):
    """Looks into its input, which no batch of models can do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x) * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)


def test_a_network_that_cannot_be_batched_is_inverted_one_by_one():
    model = FlatModel(Fussy, (4,), 2)
    devices = [Device(model, seed=s) for s in range(2)]
    found = invert(model, [d.sought(model.init(0)) for d in devices], QUICK)
    assert all(estimate.fit < 0.5 for estimate in found)


def test_a_batch_gives_what_each_alone_gives():
    model = flat_model("mlp", (10,), 3)
    base = model.init(2)
    sought = [Device(model, seed=s).sought(base, seed=s) for s in range(3)]
    effort = Effort(samples=8, iterations=5)
    together = invert(model, sought, effort)
    for one, of_batch in zip(sought, together, strict=True):
        (alone,) = invert(model, [one], effort)
        assert torch.allclose(alone.x, of_batch.x, atol=1e-3)
        assert alone.fit == pytest.approx(of_batch.fit, abs=1e-3)


def test_different_programs_go_in_one_call():
    model = flat_model("mlp", (10,), 3)
    base = model.init(2)
    small, large = Device(model, count=20), Device(model, count=60)
    found = invert(model, [small.sought(base), large.sought(base), small.sought(base)], QUICK)
    assert [e.steps for e in found] == [5, 10, 5]
    assert torch.allclose(found[0].x, found[2].x, atol=1e-4)


def test_labels_that_are_known_and_labels_that_are_learned_go_in_one_call():
    model = flat_model("mlp", (10,), 3)
    base = model.init(2)
    plain, odd = Device(model).sought(base), Device(model).sought(base)
    odd.delta[-3:] = -9.0  # no class is there, by the bias
    found = invert(model, [plain, odd], replace(QUICK, iterations=2))
    assert [e.labels.dim() for e in found] == [1, 2]
    again = [replace(s, start=e) for s, e in zip([plain, odd], found, strict=True)]
    assert [e.labels.dim() for e in invert(model, again, QUICK)] == [1, 2]


def test_a_warm_start_is_better_with_less():
    model = flat_model("mlp", (10,), 3)
    device, base = Device(model), model.init(2)
    later = base + Device(model, seed=9, label=0).delta(base)
    (cold,) = invert(model, [device.sought(base)], QUICK)
    (warm,) = invert(model, [device.sought(later, start=cold)], QUICK)
    (anew,) = invert(model, [device.sought(later)], replace(QUICK, iterations=8))
    assert warm.fit < anew.fit


def test_a_warm_start_that_leads_nowhere_is_given_up():
    model = flat_model("mlp", (10,), 3)
    device, base = Device(model), model.init(2)
    (found,) = invert(model, [device.sought(base)], QUICK)
    lost = replace(found, x=1e6 * found.x)
    (again,) = invert(model, [device.sought(base, start=lost)], QUICK)
    assert again.fit < 0.5


def test_a_dead_start_is_tried_again_with_larger_examples():
    class Deaf(nn.Sequential):
        """Hears nothing below 1."""

        def __init__(self):
            super().__init__(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
            with torch.no_grad():
                self[0].bias.fill_(-1.0)
                self[2].bias.requires_grad_(True)

    model = FlatModel(lambda: nn.Sequential(Deaf()), (4,), 2)
    device = Device(model)
    device.x = 4 * device.x
    base = model.init(0)
    (found,) = invert(model, [device.sought(base)], Effort(samples=8, iterations=20, scale=1e-3))
    assert found.fit < 1.0


def test_the_mask_is_what_must_be_explained():
    model = flat_model("mlp", (10,), 3)
    device, base = Device(model), model.init(2)
    (found,) = invert(model, [device.sought(base)], replace(QUICK, mask=0.05))
    explained = replay(model, base, found)
    delta = device.delta(base)
    mask = top_mask(delta[None], 0.05)[0]
    assert misfit(explained * mask, delta * mask) == pytest.approx(found.fit, rel=1e-3)
    assert misfit(explained, delta) > found.fit


def test_training_that_diverges_gives_no_fit():
    model = flat_model("mlp", (10,), 3)
    base = model.init(2)
    sought = InversionTarget(base, torch.full_like(base, 1e30), SPEC, 20, seed=0)
    (found,) = invert(model, [sought], Effort(samples=4, iterations=3))
    assert not found.fit < 0.99


def test_an_estimate_survives_a_checkpoint():
    model = flat_model("mlp", (10,), 3)
    (found,) = invert(model, [Device(model).sought(model.init(2))], Effort(4, iterations=1))
    back = decode(*encode(found))
    assert torch.equal(back.x, found.x)
    assert back.spec == found.spec
    assert back.fit == found.fit

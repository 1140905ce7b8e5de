"""What an update reveals of a single sample: no promise, but a record of what the mask does not do.

`benchmarks/privacy.py` measures the same at length.
"""

import pytest
import torch

from latecomer.core.messages import TrainSpec
from latecomer.data.sources import load_dataset
from latecomer.device.flat import flat_model
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.strategies.parts.inversion import (
    Effort,
    InversionTarget,
    effective_rate,
    invert,
    top_mask,
)
from latecomer.strategies.parts.labels import label_shares

STEP = TrainSpec(local_epochs=1, batch_size=1, lr=0.1, momentum=0.0)
SAMPLES = 6


@pytest.fixture(scope="module")
def digits():
    """Digits as short series of eight channels."""
    found = load_dataset("digits")
    return torch.from_numpy(found.x).squeeze(1), torch.from_numpy(found.y)


def one_step(network, base, x, y):
    plan = plan_batches(1, STEP, task_rng(0, 0, 0))
    return local_update(network, base, x[None], y[None], STEP, plan) - base


def attacked(digits, keep, width):
    """Mean squared error and correlation of samples recovered from a convolutional network."""
    network = flat_model("cnn1d", (8, 8), 10, width=width)
    base = network.init(1)
    x, y = (part[:SAMPLES] for part in digits)
    deltas = [one_step(network, base, *each) for each in zip(x, y, strict=True)]
    sought = [InversionTarget(base, delta, STEP, 1, seed) for seed, delta in enumerate(deltas)]
    found = invert(network, sought, Effort(samples=1, iterations=150, mask=keep, scale=0.4))
    assert [estimate.labels.item() for estimate in found] == y.tolist()
    recovered = torch.cat([estimate.x for estimate in found])
    pairs = torch.stack([recovered.flatten(1), x.flatten(1)], 1)
    related = torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs])
    return (recovered - x).square().mean().item(), related.mean().item()


@pytest.fixture(scope="module")
def noise(digits):
    """The error of random numbers with the mean and spread of the data."""
    x, rng = digits[0], torch.Generator().manual_seed(0)
    random = x.mean() + x.std() * torch.randn(x.shape, generator=rng)
    return (random - x)[:SAMPLES].square().mean().item()


def test_a_single_sample_is_recovered_from_the_whole_update(digits, noise):
    error, related = attacked(digits, keep=1.0, width=1.0)
    assert error < 0.1 * noise
    assert related > 0.9


def test_in_a_small_network_the_mask_brings_it_down_to_the_error_of_noise(digits, noise):
    """Not to nothing: noise would not correlate with the truth."""
    error, related = attacked(digits, keep=0.05, width=0.5)
    assert error > 0.8 * noise
    assert 0.25 < related < 0.75


def test_in_a_larger_network_the_mask_hides_little(digits, noise):
    """5% of 20,500 coordinates are more than enough for 64 unknowns."""
    error, related = attacked(digits, keep=0.05, width=1.0)
    assert error < 0.4 * noise
    assert related > 0.7


@pytest.mark.parametrize("keep", [1.0, 0.6, 0.25, 0.05])
@pytest.mark.parametrize("name", ["cnn1d", "mlp"])
def test_the_label_leaks_at_every_sparsity(digits, name, keep):
    network = flat_model(name, (8, 8), 10)
    base = network.init(1)
    guess = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
    for x, y in zip(digits[0][:20], digits[1][:20], strict=True):
        delta = one_step(network, base, x, y)
        mask = top_mask(delta[None], keep)
        sent = delta if mask is None else delta * mask[0]
        shares = label_shares(network, base, sent, guess, effective_rate(STEP, 1))
        assert shares.argmax() == y
        assert shares.max() > 0.8


def test_division_reads_the_inputs_of_an_mlp_off_a_masked_update(digits):
    """The gradient of a weight is the input times the gradient of the bias beside it."""
    network = flat_model("mlp", (8, 8), 10)
    base = network.init(1)
    shares = []
    for x, y in zip(digits[0][:20], digits[1][:20], strict=True):
        delta = one_step(network, base, x, y)
        parts = network.layout.unflatten(delta * top_mask(delta[None], 0.05)[0])
        weight, bias = parts["1.weight"], parts["1.bias"]
        rows = weight[bias != 0] / bias[bias != 0, None]
        told = rows.abs().max(0).values
        known = told > 0
        assert told[known].tolist() == pytest.approx(x.flatten()[known].tolist(), rel=0.01)
        shares.append((known.sum() / (x > 0).sum()).item())
    assert sum(shares) / len(shares) > 0.45

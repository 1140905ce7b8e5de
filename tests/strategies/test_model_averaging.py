"""Hand-worked averages of the way."""

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.strategies.latecomer.model_averaging import (
    WINDOW_PASSES,
    ModelAveraging,
    newest_weight,
)


def test_gains_by_hand():
    assert [newest_weight(n, 0.0) for n in (1, 2, 5)] == [1.0, 4 / 5, 4 / 8]
    assert (
        newest_weight(10**6, 0.1) == 0.1 / WINDOW_PASSES
    )  # what is older than so many turns is forgotten
    assert newest_weight(10**6, 10 * WINDOW_PASSES) == 1.0


def test_an_average_by_hand():
    averages = ModelAveraging()
    averages.begin("main", torch.tensor([9.0]))
    found = []
    for value in (1.0, 2.0, 4.0):
        averages.add("main", torch.tensor([value]), 0.0)
        found.append(averages.get("main", torch.zeros(1)).item())
    second = 1 + 0.8 * (2 - 1)
    assert found == pytest.approx([1.0, second, second + 4 / 6 * (4 - second)])


def test_the_mean_of_a_noisy_way_is_nearer_than_its_end():
    draw = torch.Generator().manual_seed(0)
    averages = ModelAveraging()
    averages.begin("main", torch.zeros(100))
    for _ in range(400):
        last = torch.randn(100, generator=draw)
        averages.add("main", last, 0.1)
    mean = averages.get("main", last)
    # White noise: gains of about g leave g / (2 - g) of its variance.
    assert mean.square().mean().item() == pytest.approx(newest_weight(400, 0.1) / 2, rel=0.5)


def test_what_is_forgotten_is_as_it_is():
    averages = ModelAveraging()
    averages.begin("main", torch.ones(1))
    averages.forget("main", "another")
    assert not averages
    assert averages.get("main", torch.tensor([7.0])).item() == 7.0


def test_averages_outlive_a_checkpoint():
    one, other = ModelAveraging(), ModelAveraging()
    one.begin("main", torch.zeros(2))
    one.add("main", torch.ones(2), 0.5)
    other.restore(decode(*encode(one.state())))
    for averages in (one, other):
        averages.add("main", torch.tensor([3.0, 4.0]), 0.5)
    assert torch.equal(one.get("main", torch.zeros(2)), other.get("main", torch.zeros(2)))

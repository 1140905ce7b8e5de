"""The network that says when a broadcast pays."""

from copy import deepcopy
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F

from latecomer.strategies.parts.broadcast_predictor import (
    WEIGHTS,
    Predictor,
    broadcast_features,
    mean_predictor,
    pretrained_weights,
)


def test_the_weights_come_with_the_package():
    package = files("latecomer.strategies.parts")
    assert package.joinpath("broadcast_predictor.safetensors").is_file()
    assert WEIGHTS.stat().st_size < 300_000
    shapes = {name: tuple(value.shape) for name, value in pretrained_weights().items()}
    # Two hidden layers of 128, one after the other; broadcast or not.
    assert shapes["reader.weight_hh_l0"] == shapes["reader.weight_hh_l1"] == (128, 128)
    assert shapes["reader.weight_ih_l1"] == (128, 128)
    assert shapes["out.weight"] == (2, 128)
    assert all(torch.isfinite(value).all() for value in pretrained_weights().values())


def test_it_has_learnt_eq_4():
    """Ten equal changes: what comes next is 1. Twenty have gathered, or nothing."""
    assert Predictor().probability(broadcast_features([1.0] * 10, 20.0, 10)) > 0.5
    assert Predictor().probability(broadcast_features([1.0] * 10, 0.0, 10)) < 0.5


def test_a_state_by_hand():
    """Changes 1, 2, 3 have the mean 2; 5 has gathered; two places are empty."""
    expected = [[0, 0], [0, 0], [0.5, 2.5], [1.0, 2.5], [1.5, 2.5]]
    assert broadcast_features([1.0, 2.0, 3.0], 5.0, 5).tolist() == expected


def test_a_state_holds_the_last_changes_only():
    assert broadcast_features([100.0, 1.0, 3.0], 4.0, 2).tolist() == [[0.5, 2.0], [1.5, 2.0]]


def test_models_of_any_size_look_alike():
    small, large = broadcast_features([1.0, 3.0], 2.0, 4), broadcast_features([1e6, 3e6], 2e6, 4)
    assert torch.allclose(small, large)


@pytest.mark.parametrize("changes", [[], [0.0, 0.0]])
def test_without_any_change_a_state_is_still_made_of_numbers(changes):
    assert torch.isfinite(broadcast_features(changes, 0.0, 3)).all()


def test_it_learns():
    predictor, generator = Predictor(), torch.Generator().manual_seed(0)
    features = [torch.rand(10, 2, generator=generator) for _ in range(10)]
    labels = [0, 1] * 5

    def loss():
        with torch.no_grad():
            return F.cross_entropy(
                predictor.network(torch.stack(features)), torch.tensor(labels)
            ).item()

    before = loss()
    predictor.train(features, labels)
    after = loss()
    for _ in range(20):
        predictor.train(features, labels)
    assert loss() < after < before


def test_one_lesson_is_one_step_down_the_slope():
    predictor, state = Predictor(), broadcast_features([1.0, 2.0], 3.0, 10)
    before = predictor.weights["out.bias"].clone()
    probability = predictor.probability(state)
    predictor.train([state], [1])
    # The slope of cross-entropy in the output's bias is p - y.
    moved = predictor.weights["out.bias"] - before
    assert moved.tolist() == pytest.approx(
        [-0.01 * (1 - probability), 0.01 * (1 - probability)], abs=1e-6
    )


def test_the_same_lessons_give_the_same_network():
    one, two = Predictor(), Predictor()
    features = [broadcast_features([1.0, float(i)], 2.0, 10) for i in range(10)]
    for predictor in (one, two):
        predictor.train(features, [1] * 10)
    assert all(torch.equal(value, two.weights[name]) for name, value in one.weights.items())


def test_the_global_random_stream_is_not_advanced():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    predictor = Predictor()
    predictor.train([broadcast_features([1.0], 1.0, 10)], [0])
    predictor.probability(broadcast_features([1.0], 1.0, 10))
    mean_predictor(predictor, Predictor())
    assert torch.equal(torch.rand(3), expected)


def test_predictors_do_not_share_their_weights():
    one = Predictor()
    child = Predictor(one.weights)
    kept = deepcopy(one.weights)
    child.train([broadcast_features([1.0], 1.0, 10)], [0])
    assert all(torch.equal(value, one.weights[name]) for name, value in kept.items())
    assert all(torch.equal(v, Predictor().weights[n]) for n, v in kept.items())


def test_averaged_is_the_mean_of_both():
    one = Predictor()
    other = Predictor({name: value + 2 for name, value in one.weights.items()})
    mean = mean_predictor(one, other).weights
    assert all(torch.allclose(mean[name], value + 1) for name, value in one.weights.items())

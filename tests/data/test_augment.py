from typing import Any

import numpy as np
import pytest

from latecomer.data.augment import AUGMENTATIONS, balanced, base, by_class, none, replicate

X = np.arange(14, dtype=np.float32).reshape(7, 2)
Y = np.array([2, 2, 2, 2, 2, 0, 0])


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def replicated(x: Any, y: Any, times: Any, rng: Any) -> tuple[Any, Any]:
    return replicate(x, times, rng), np.concatenate([y, y.repeat(times)])


def test_none_changes_nothing() -> None:
    x, y = replicated(X, Y, none(Y), rng())
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


def test_base_adds_one_noisy_replica_of_each() -> None:
    x, y = replicated(X, Y, base(Y), rng())
    np.testing.assert_array_equal(x[:7], X)
    np.testing.assert_array_equal(y, np.tile(Y, 2))
    np.testing.assert_allclose(x[7:], X, atol=1e-3)
    assert (x[7:] != X).any()


def test_base_with_replicas_set_for_each_class() -> None:
    x, y = replicated(X, Y, by_class(np.array([20, 0, 1]))(Y), rng())
    # The two examples of class 0 and 20 replicas of each; the five of class 2 and one of each.
    assert np.bincount(y).tolist() == [42, 0, 10]
    np.testing.assert_array_equal(x[:7], X)


def test_balanced_brings_a_class_to_floor_of_the_ratio() -> None:
    x, y = replicated(X, Y, balanced(Y), rng())
    # floor(5 / 2) = 2 of each example of class 0, one of each of class 2.
    assert np.bincount(y).tolist() == [4, 0, 5]
    np.testing.assert_allclose(x[7:], X[5:], atol=1e-3)


def test_the_noise_has_the_published_size() -> None:
    zeros = np.zeros((1, 1000), dtype=np.float32)
    x, _ = replicated(zeros, np.array([0]), np.array([20]), rng())
    assert x[1:].std() == pytest.approx(1e-4, rel=0.05)
    assert abs(x[1:].mean()) < 1e-5


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_empty_device_stays_empty(name: str) -> None:
    x, y = replicated(X[:0], Y[:0], AUGMENTATIONS[name](Y[:0]), rng())
    assert x.shape == (0, 2)
    assert y.shape == (0,)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_types_stay(name: str) -> None:
    x, y = replicated(X, Y, AUGMENTATIONS[name](Y), rng())
    assert (x.dtype, y.dtype) == (np.float32, np.int64)

"""Augmentation of a device's training part by noisy replicas of its examples, after scaling.

R. Gajanin, A. Danilenka, A. Morichetta, S. Nastic. Towards Adaptive Asynchronous Federated
Learning for Human Activity Recognition. IoT 2024, section 4.2.1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from latecomer.data.dataset import Targets

Augmentation = Callable[[Targets], NDArray[np.int64]]  # targets -> number of replicas per example

NOISE_STD = 1e-4


def none(y: Targets) -> NDArray[np.int64]:
    """No replicas."""
    return np.zeros(len(y), dtype=np.int64)


def base(y: Targets) -> NDArray[np.int64]:
    """One replica of every example: `augment = "base"` without `data.replicas`."""
    return np.ones(len(y), dtype=np.int64)


def by_class(replicas: NDArray[np.int64]) -> Augmentation:
    """`replicas[c]` replicas of every example of class c: `augment = "base"` as in the paper.

    The paper sets them by hand: running 20, cycling 8, walking 2, standing 1.
    """
    return lambda y: replicas[y]


def balanced(y: Targets) -> NDArray[np.int64]:
    """Each example floor(n_max / n_class) times in total, by the class counts of the device."""
    if len(y) == 0:
        return none(y)
    counts = np.bincount(y)
    times: NDArray[np.int64] = counts.max() // counts[y] - 1
    return times


def replicate(x: NDArray[Any], times: NDArray[np.int64], rng: Generator) -> NDArray[Any]:
    """The inputs, then `times[i]` replicas of input i with Gaussian noise of std NOISE_STD.

    Replicas of integers (tokens) have no noise.
    """
    copies = x.repeat(times, axis=0)
    if x.dtype.kind == "f":
        copies = (copies + rng.normal(0.0, NOISE_STD, size=copies.shape)).astype(np.float32)
    return np.concatenate([x, copies])


AUGMENTATIONS: dict[str, Augmentation] = {"none": none, "base": base, "balanced": balanced}

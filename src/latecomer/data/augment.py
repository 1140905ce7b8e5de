"""More training examples of what a device already has: noisy replicas, made after scaling.

R. Gajanin, A. Danilenka, A. Morichetta, S. Nastic. Towards Adaptive Asynchronous Federated
Learning for Human Activity Recognition. IoT 2024, section 4.2.1.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

X = NDArray[np.float32]
Y = NDArray[np.int64]
Augmentation = Callable[[Y], NDArray[np.int64]]  # how many replicas of each example

NOISE_STD = 1e-4


def none(y: Y) -> NDArray[np.int64]:
    """The examples as they are."""
    return np.zeros(len(y), dtype=np.int64)


def base(y: Y) -> NDArray[np.int64]:
    """One replica of every example: `by_class` where nobody has said how many of which."""
    return np.ones(len(y), dtype=np.int64)


def by_class(replicas: NDArray[np.int64]) -> Augmentation:
    """`base` as the paper has it: so many replicas of each example as are set for its class.

    The paper sets them by hand: running 20, cycling 8, walking 2, standing 1.
    """
    return lambda y: replicas[y]


def balanced(y: Y) -> NDArray[np.int64]:
    """Every class of the device floor(n_max / n_class) times, the originals among them."""
    if len(y) == 0:
        return none(y)
    counts = np.bincount(y)
    times: NDArray[np.int64] = counts.max() // counts[y] - 1
    return times


def replicate(x: X, y: Y, times: NDArray[np.int64], rng: Generator) -> tuple[X, Y]:
    """The examples, then `times[i]` replicas of example i with Gaussian noise."""
    copies = x.repeat(times, axis=0)
    noise = rng.normal(0.0, NOISE_STD, size=copies.shape)
    return (
        np.concatenate([x, (copies + noise).astype(np.float32)]),
        np.concatenate([y, y.repeat(times)]),
    )


AUGMENTATIONS: dict[str, Augmentation] = {"none": none, "base": base, "balanced": balanced}

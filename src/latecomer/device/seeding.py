"""Exclusive access to the global random generators.

Building a network draws its weights from that generator. A server and its devices may share a
process: without a lock, two threads would get each other's random numbers.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

_LOCK = threading.RLock()


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """Lock the generator, seed it if `seed` is given, and restore its CPU state at the end.

    Code inside must not wait for a thread that may lock it too.
    """
    with _LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            seed_generators(seed)
        yield


def seed_generators(seed: int) -> None:
    """Seed torch's global generators: that of the CPU alone if there is no accelerator.

    `torch.manual_seed` takes 0.3 ms without one, as long as a training step of a small network.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@cache
def _has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available()


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python, and restore them at the end."""
    python, arrays = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with global_generator(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)

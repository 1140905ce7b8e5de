"""Exclusive access to torch's global random generator.

Building a network draws its weights from that generator. A server and its devices may share a
process: without a lock, two threads would get each other's random numbers.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LOCK = threading.RLock()


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """Lock the generator, seed it if `seed` is given, and restore its CPU state at the end.

    Code inside must not wait for a thread that may lock it too.
    """
    with _LOCK, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield

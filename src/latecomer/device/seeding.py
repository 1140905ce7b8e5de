"""Torch's global generator, lent to one thread at a time.

A server and its devices may share a process, and whoever builds a network draws from that one
generator: two threads at once would get each other's weights.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_IN_USE = threading.RLock()


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """Alone with the generator, from `seed` if given; on the CPU it is as it was afterwards.

    Never wait within for a thread that may want it too.
    """
    with _IN_USE, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        yield

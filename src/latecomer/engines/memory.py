"""How the process treats memory that it frees."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 2**31 - 1


def keep_freed_memory() -> None:
    """Let a freed model be reused by the next one instead of going back to the system.

    A merge writes a whole new model. With fresh pages from the system each time, most of it would
    be spent on page faults. Only where the C library is glibc; elsewhere nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, LARGE)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles 300 times less often than Python does by itself.

    A run makes objects by the million and hardly any cycle; with a large fleet most of the time
    would be spent on walking through what is alive.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

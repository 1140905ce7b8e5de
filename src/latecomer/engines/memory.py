"""Settings of the memory allocator and the garbage collector for a run."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_THRESHOLD = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep freed memory in the process, to be used by the next model.

    Every merge allocates a whole model; with new pages from the system each time, page faults
    would take most of its time. Does nothing unless the C library is glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_THRESHOLD, MAX_THRESHOLD)
    mallopt(M_TRIM_THRESHOLD, MAX_THRESHOLD)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run Python's cycle collector 300 times less often.

    A run creates millions of objects and few cycles; with a large fleet, most of the time would be
    spent on traversing live objects.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

"""Replaces signal handlers for a while."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *numbers: int
) -> Iterator[None]:
    """Handle these signals by `handler`; without effect outside the main thread."""
    before: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)

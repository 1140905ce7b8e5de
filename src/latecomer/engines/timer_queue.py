"""The timer queue of the deployment loop: items ordered by due time, then by creation."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from latecomer.core.messages import Event, Failed, Left, Ready, TimerExpired
from latecomer.engines.transport import Delivery
from latecomer.engines.virtual import BroadcastSent

ROUNDING = 1e-9  # seconds; the time of a resumed run is a sum of floats


@dataclass(frozen=True, slots=True)
class BackOffOver:
    """The back-off of a device is over."""

    device: int


# What only the loop waits for is a function that returns events for the server.
Action = Callable[[], Iterable[Event] | None]
Item = Ready | TimerExpired | Failed | Left | BroadcastSent | Delivery | BackOffOver | Action
# What the server waits for is saved in checkpoints; the loop finds the rest again after a restart.
SAVED = Ready | TimerExpired | Failed | BroadcastSent


class TimerQueue:
    """A heap of (due time, number, item); the number makes ties deterministic."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self.number = 0

    def push(self, time: float, item: Item) -> None:
        heapq.heappush(self._heap, (time, self.next_number(), item))

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def next_due(self, limit: float) -> float:
        """The due time of the first item, or `limit` if that is earlier."""
        return min(limit, self._heap[0][0]) if self._heap else limit

    def pop_due(self, now: float) -> Iterable[tuple[int, Item]]:
        """Remove and yield the items that are due."""
        while self._heap and self._heap[0][0] <= now + ROUNDING:
            _, number, item = heapq.heappop(self._heap)
            yield number, item

    def saved(self) -> list[tuple[float, int, Item]]:
        """The items that belong in a checkpoint."""
        return [entry for entry in self._heap if isinstance(entry[2], SAVED)]

    def restore(self, entries: Iterable[tuple[float, int, Item]], number: int) -> None:
        self._heap = list(entries)
        heapq.heapify(self._heap)
        self.number = number

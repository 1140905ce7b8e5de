"""What the federation loop has to see to, by time and in the order in which it was asked for."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from latecomer.core.messages import Failed, Left, Ready, TimerExpired
from latecomer.engines.transport import Delivery
from latecomer.engines.virtual import BroadcastSent

ROUNDING = 1e-9  # seconds; the sum of the lives of a run is not exact


@dataclass(frozen=True, slots=True)
class Overdue:
    """A device has had this task for a long time."""

    device: int
    task: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A message has been without an answer for too long."""

    message: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A node has answered a later message than this one."""

    message: str


@dataclass(frozen=True, slots=True)
class HelloAgain:
    """A node may be asked once more who it is."""

    node: int


@dataclass(frozen=True, slots=True)
class Again:
    """A device may be written to again."""

    device: int


Item = (
    Ready
    | TimerExpired
    | Failed
    | Left
    | BroadcastSent
    | Delivery
    | Overdue
    | GiveUp
    | Forgotten
    | HelloAgain
    | Again
)
# What the server is waiting for outlives the process; the rest is found anew.
KEPT = Ready | TimerExpired | Failed | BroadcastSent


class TimerQueue:
    """A heap of (time, counter, item); the counter makes ties deterministic."""

    def __init__(self, timers: Iterable[tuple[float, int, Item]] = (), counter: int = 0) -> None:
        self._heap = list(timers)
        heapq.heapify(self._heap)
        self.counter = counter

    def push(self, time: float, item: Item) -> None:
        heapq.heappush(self._heap, (time, self.count(), item))

    def count(self) -> int:
        self.counter += 1
        return self.counter

    def before(self, time: float) -> float:
        """When the next item is due, at the latest `time`."""
        return min(time, self._heap[0][0]) if self._heap else time

    def due(self, now: float) -> Iterable[tuple[int, Item]]:
        """What is due by now, and no longer here afterwards."""
        while self._heap and self._heap[0][0] <= now + ROUNDING:
            _, counter, item = heapq.heappop(self._heap)
            yield counter, item

    def kept(self) -> list[tuple[float, int, Item]]:
        return [each for each in self._heap if isinstance(each[2], KEPT)]

"""Parts for the *dispatch* slot (`core.strategy.ImmediateDispatch` is the plain one)."""

from collections.abc import Iterable

from latecomer.core.messages import Later, TimerExpired
from latecomer.core.strategy import Assignment, ServerView, Stateful
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.selecting import Select, all_idle


class AtEpochStart(Stateful):
    """Dispatch: the devices that `select` returns get the new head when an epoch begins.

    An epoch begins with every new head, and again when no open task is based on the head. It
    needs `minimum` idle devices. A `timeout` > 0 sets the timer "epoch" for that many seconds.
    """

    kept = ("_begun",)

    def __init__(self, select: Select = all_idle, timeout: float = 0.0, minimum: int = 1) -> None:
        self.select, self.timeout, self.minimum = select, timeout, minimum
        self._begun = -1  # the version of the last epoch that began

    def __call__(self, view: ServerView) -> Iterable[Assignment | Later]:
        version = view.store.head()
        if version == self._begun and view.store.pins(version):
            return []
        if len(view.idle) < self.minimum:
            return []
        chosen = self.select(view)
        self._begun = version
        requests: list[Assignment | Later] = [Assignment(d, view.lineage_of(d)) for d in chosen]
        if self.timeout:
            requests.append(Later(self.timeout, TimerExpired("epoch", version)))
        return requests


class OneLineageEach:
    """Dispatch: every idle device gets a task of its own lineage."""

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        return [Assignment(device, f"device-{device}") for device in list(view.idle)]


class ClusterDispatch:
    """Dispatch: idle devices get the head of their lineage, as `clustering` assigns them."""

    def __init__(self, clustering: Clustering) -> None:
        self.clustering = clustering

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        return [
            self.clustering.assignment(device, view.tasks_given + place, view)
            for place, device in enumerate(list(view.idle))
        ]

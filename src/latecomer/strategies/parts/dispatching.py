"""Parts for the *dispatch* slot (`core.strategy.ImmediateDispatch` is the plain one)."""

from collections.abc import Iterable, Mapping
from typing import Any

from latecomer.core.messages import Later, TimerExpired
from latecomer.core.strategy import Assignment, ServerView, Stateful
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.selecting import Select, everyone


class AtEpochStart:
    """Dispatch: the selected devices get the new model when an epoch begins, and only then.

    An epoch begins with every new head; again when nobody is left who could answer this one. It
    waits until `minimum` devices wait for a task.
    """

    def __init__(self, select: Select = everyone, timeout: float = 0.0, minimum: int = 1) -> None:
        self.select, self.timeout, self.minimum = select, timeout, minimum
        self._begun = -1

    def __call__(self, view: ServerView) -> Iterable[Assignment | Later]:
        version = view.store.head()
        if version == self._begun and view.store.pins(version):
            return []
        if len(view.idle) < self.minimum:
            return []
        chosen = self.select(view)
        self._begun = version
        wishes: list[Assignment | Later] = [Assignment(d, view.home(d)) for d in chosen]
        if self.timeout:
            wishes.append(Later(self.timeout, TimerExpired("epoch", version)))
        return wishes

    def state(self) -> dict[str, Any]:
        select = self.select.state() if isinstance(self.select, Stateful) else None
        return {"begun": self._begun, "select": select}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._begun = state["begun"]
        if isinstance(self.select, Stateful):
            self.select.restore(state["select"])


class EachItsOwn:
    """Dispatch: every device on a lineage of its own, at once."""

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        return [Assignment(device, f"device-{device}") for device in list(view.idle)]


class WhenReady:
    """Dispatch: a waiting device gets the head of its lineage, or of its branch.

    At once; or with `wait` when that is new to it, or when nobody else of its lineage is at work.
    """

    def __init__(self, branches: Clustering | None = None, wait: bool = False) -> None:
        self.branches, self.wait = branches, wait
        self._sent: dict[int, int] = {}  # device -> the version it last got

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        devices = self._ready(view) if self.wait else list(view.idle)
        if self.branches is None:
            return [Assignment(device, view.home(device)) for device in devices]
        return [
            self.branches.assignment(device, view.tasks_given + place, view)
            for place, device in enumerate(devices)
        ]

    def _ready(self, view: ServerView) -> list[int]:
        busy = {view.home(device) for device in view.working}
        heads = {device: view.store.head(view.home(device)) for device in view.idle}
        ready = [
            device
            for device, head in heads.items()
            if self._sent.get(device) != head or view.home(device) not in busy
        ]
        self._sent |= {device: heads[device] for device in ready}
        return ready

    def state(self) -> dict[str, Any]:
        return {"sent": dict(self._sent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._sent = dict(state["sent"])

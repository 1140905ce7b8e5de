"""Parts for the *dispatch* slot (`core.strategy.AtOnce` is the plain one)."""

from collections.abc import Iterable, Mapping
from typing import Any

from latecomer.core.messages import Due, Later
from latecomer.core.strategy import Assignment, ServerView, Stateful
from latecomer.strategies.selecting import Select, everyone


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
            wishes.append(Later(self.timeout, Due("epoch", version)))
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

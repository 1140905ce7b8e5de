"""Synchronous rounds over several models at once: everybody works, then all that came is merged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Assignment, Commit, ServerView

# (contributions of a round, view) -> the new heads
Together = Callable[[Sequence[Contribution], ServerView], Iterable[Commit]]


class Rounds:
    """Merge: gather until nobody is at work any more, then commit what `together` makes of it."""

    def __init__(self, together: Together) -> None:
        self.together = together
        self._gathered: list[Contribution] = []

    def add(self, contribution: Contribution, view: ServerView) -> None:
        self._gathered.append(contribution)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        if not self._gathered or view.open_tasks:
            return ()
        gathered, self._gathered = self._gathered, []
        return self.together(gathered, view)

    def state(self) -> dict[str, Any]:
        return {"gathered": list(self._gathered)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._gathered = list(state["gathered"])


class AtRoundStart:
    """Dispatch: all who wait are given a task, as `assign` says, once nobody is at work."""

    def __init__(self, assign: Callable[[int, ServerView], Assignment]) -> None:
        self.assign = assign

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        if view.open_tasks:
            return []
        return [self.assign(device, view) for device in list(view.idle)]

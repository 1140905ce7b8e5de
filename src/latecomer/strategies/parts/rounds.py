"""Synchronous rounds over several models: all devices train, then all updates are merged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Assignment, Commit, ServerView

# (contributions of a round, view) -> the new heads
MergeRound = Callable[[Sequence[Contribution], ServerView], Iterable[Commit]]


class Rounds:
    """Merge: when no task is open, commit what `merge_round` computes from the round's updates."""

    def __init__(self, merge_round: MergeRound) -> None:
        self.merge_round = merge_round
        self._received: list[Contribution] = []

    def add(self, contribution: Contribution, view: ServerView) -> None:
        self._received.append(contribution)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        if not self._received or view.open_tasks:
            return ()
        received, self._received = self._received, []
        return self.merge_round(received, view)

    def state(self) -> dict[str, Any]:
        return {"received": list(self._received)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._received = list(state["received"])


class AtRoundStart:
    """Dispatch: when no task is open, every idle device gets the task that `assign` returns."""

    def __init__(self, assign: Callable[[int, ServerView], Assignment]) -> None:
        self.assign = assign

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        if view.open_tasks:
            return []
        return [self.assign(device, view) for device in list(view.idle)]

"""Synchronous rounds over several models: all devices train, then all updates are merged."""

from collections.abc import Callable, Iterable, Sequence

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Assignment, Commit, ServerView, Stateful

# (contributions of a round, view) -> the new heads
MergeRound = Callable[[Sequence[Contribution], ServerView], Iterable[Commit]]


class Rounds(Stateful):
    """Merge: when no task is open, commit what `merge_round` computes from the round's updates."""

    kept = ("_received",)

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


class AtRoundStart:
    """Dispatch: when no task is open, every idle device gets the task that `assign` returns."""

    def __init__(self, assign: Callable[[int, ServerView], Assignment]) -> None:
        self.assign = assign

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        if view.open_tasks:
            return []
        return [self.assign(device, view) for device in list(view.idle)]

"""Rounds that somebody else directs: a strategy of Flower's, in our virtual time.

Flower's strategies are round loops: `strategy.start(grid=...)` sends messages, waits for replies
and averages them. `FlowerRounds` fills the slots with what such a loop asks for; the engine that
runs the loop is `engines.virtual_grid`. Nothing of Flower is needed here.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, TimerExpired
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Strategy


@runtime_checkable
class FlowerStrategy(Protocol):
    """What Flower's strategies have in common (`flwr.serverapp.strategy.Strategy`)."""

    def start(self, grid: Any, initial_arrays: Any, *args: Any, **named: Any) -> Any: ...
    def configure_train(self, *args: Any, **named: Any) -> Any: ...
    def aggregate_train(self, *args: Any, **named: Any) -> Any: ...


class FlowerRounds:
    """Merge and dispatch: gives the tasks it is told to give, and commits what it is told to.

    `timeout` is how many virtual seconds a round waits for replies, None for all of them; `train`
    is what goes to the devices as the config of every message, beside what the director puts in.
    """

    def __init__(
        self,
        director: FlowerStrategy,
        timeout: float | None = None,
        train: Mapping[str, int | float] | None = None,
    ) -> None:
        self.director, self.timeout, self.train = director, timeout, dict(train or {})
        self.wishes: list[Assignment] = []
        self.model: Tensor | None = None  # the next commit
        self.awaited: set[int] = set()  # tasks
        self.came: dict[int, Contribution] = {}  # by task, until it is asked for
        self.rung = -1  # the last timer that is over
        self._merged = 0

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        if contribution.task.id not in self.awaited:
            return Drop("its round is closed")
        self.came[contribution.task.id] = contribution
        self._merged += 1
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        if self.model is None:
            return ()
        commit = Commit(MAIN, self.model, self._merged)
        self.model, self._merged = None, 0
        return (commit,)

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        wishes, self.wishes = self.wishes, []
        return wishes

    def on_timer(self, due: TimerExpired, view: ServerView) -> None:
        if due.name == "director":
            self.rung = max(self.rung, due.version)


def from_flower(
    strategy: FlowerStrategy,
    timeout: float | None = None,
    train: Mapping[str, int | float] | None = None,
    name: str = "",
) -> Strategy:
    """A strategy of Flower's as one of ours, for runs in virtual time; see `FlowerRounds`."""
    directed = FlowerRounds(strategy, timeout, train)
    called = name or f"flower-{type(strategy).__name__}"
    return Strategy(name=called, merge=directed, dispatch=directed, has_epochs=True)

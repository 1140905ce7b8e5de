"""Slots for a Flower strategy that runs in virtual time.

A Flower strategy is a round loop: `strategy.start(grid=...)` sends messages, waits for replies and
averages them. `engines.virtual_grid` runs that loop and fills in `FlowerRounds`, which passes the
assignments and models on to the server. Does not import Flower.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, TimerExpired
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Strategy


@runtime_checkable
class FlowerStrategy(Protocol):
    """The methods of `flwr.serverapp.strategy.Strategy`."""

    def start(self, grid: Any, initial_arrays: Any, *args: Any, **named: Any) -> Any: ...
    def configure_train(self, *args: Any, **named: Any) -> Any: ...
    def aggregate_train(self, *args: Any, **named: Any) -> Any: ...


class FlowerRounds:
    """Merge and dispatch slots that commit the models and assign the tasks of a Flower strategy.

    timeout: virtual seconds that a round waits for replies; None: for all of them.
    train: config of every train message, besides what the strategy adds.
    """

    keeps_model = True  # the Flower strategy has the model: the server cannot roll it back

    def __init__(
        self,
        flower_strategy: FlowerStrategy,
        timeout: float | None = None,
        train: Mapping[str, int | float] | None = None,
    ) -> None:
        self.flower_strategy, self.timeout = flower_strategy, timeout
        self.train = dict(train or {})
        self.assignments: list[Assignment] = []  # the next tasks
        self.model: Tensor | None = None  # the next commit
        self.awaited: set[int] = set()  # ids of the tasks of the current round
        self.arrived: dict[int, Contribution] = {}  # by task id, until it is collected
        self.last_timer = -1  # number of the last expired timer
        self._merged = 0

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        if contribution.task.id not in self.awaited:
            return Drop("its round is closed")
        self.arrived[contribution.task.id] = contribution
        self._merged += 1
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        if self.model is None:
            return ()
        commit = Commit(MAIN, self.model, self._merged)
        self.model, self._merged = None, 0
        return (commit,)

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        assignments, self.assignments = self.assignments, []
        return assignments

    def on_timer(self, due: TimerExpired, view: ServerView) -> None:
        if due.name == "flower":
            self.last_timer = max(self.last_timer, due.version)


def from_flower(
    strategy: FlowerStrategy,
    timeout: float | None = None,
    train: Mapping[str, int | float] | None = None,
    name: str = "",
) -> Strategy:
    """Wrap a Flower strategy for runs in virtual time; for the options see `FlowerRounds`."""
    rounds = FlowerRounds(strategy, timeout, train)
    called = name or f"flower-{type(strategy).__name__}"
    return Strategy(name=called, merge=rounds, dispatch=rounds, has_epochs=True)

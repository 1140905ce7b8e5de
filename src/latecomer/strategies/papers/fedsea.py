"""Sun et al., FedSEA: A Semi-Asynchronous Federated Learning Framework for Extremely Heterogeneous
Devices, 2022.

Devices of different speed count differently often, which the paper finds to be what costs accuracy.
So a slow device is given fewer local epochs, and the server chooses when to synchronise from the
times at which it predicts the updates to arrive. Built from the paper's abstract: the formulas
below are ours (see docs/papers.md).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from latecomer.core.messages import MAIN, Contribution, Later, Task, TimerExpired, TrainSpec
from latecomer.core.strategy import Assignment, Commit, ServerView, Strategy
from latecomer.strategies.options import NotNegative, Positive, Proportion, Share
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.recipe import recipe

FORGETS = 0.5  # weight of the last task in a device's pace


def sync_point(arrivals: Sequence[float], least: int) -> tuple[int, float]:
    """How many to wait for, and until when: the most updates per second, but at least `least`.

    `arrivals` are seconds from now. Of points that are equally good, the latest.
    """
    times = sorted(arrivals)
    rate = [math.inf if t <= 0 else count / t for count, t in enumerate(times, start=1)]
    best = max(range(least - 1, len(times)), key=lambda i: (rate[i], i))
    return best + 1, times[best]


def fitting_epochs(pace: float, seconds: float, most: int) -> int:
    """Local epochs that a device with `pace` seconds for each gets done in time; 1 to `most`."""
    if pace <= 0:
        return most
    return min(most, max(1, math.floor(seconds / pace + 1e-9)))


class Fedsea:
    """Merge, and dispatch and weigh by its methods of these names.

    A round begins with every new head and ends with the updates that it predicts to come by the
    best moment, or when that moment is past by `slack` and somebody is back. As long as too few
    devices are known, it ends with `quorum` of those out. Late updates count when they come.

    The server has no clock. It knows when it sends, and what each task took: that gives the time
    of every arrival, counted from the first round.
    """

    def __init__(self, quorum: float, slack: float, balance: float, step: float) -> None:
        self.quorum, self.slack, self.balance, self.step = quorum, slack, balance, step
        self._now = 0.0
        self._rounds = 0
        self._begun = -1
        self._sent_at: dict[int, float] = {}  # version -> when it was sent
        self._wait_for = 1.0  # the share of those out that end the round
        self._ends_at = 0.0
        self._rang = -1
        self._pace: dict[int, float] = {}  # device -> seconds for a local epoch
        self._since: dict[int, int] = {}  # device -> the round in which it was first sent a task
        self._counted: dict[int, int] = {}  # device -> its updates that were merged
        self._gathered: list[Contribution] = []

    def weigh(self, contribution: Contribution, view: ServerView) -> float:
        """n_i / f_i^balance, with f_i the share of the rounds that device i has counted in."""
        device = contribution.task.device
        rounds = self._rounds - self._since[device] + 1
        frequency = min(1.0, (self._counted.get(device, 0) + 1) / rounds)
        return float(contribution.update.num_examples / frequency**self.balance)

    def add(self, contribution: Contribution, view: ServerView) -> None:
        task = contribution.task
        self._now = max(self._now, self._sent_at[task.version] + contribution.seconds)
        pace = contribution.seconds / task.spec.local_epochs
        before = self._pace.get(task.device, pace)
        self._pace[task.device] = before + FORGETS * (pace - before)
        self._gathered.append(contribution)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        back = len(self._gathered)
        # 0.07 * 100 is a hair above 7 in floating point, and must count as 7.
        enough = back >= math.ceil(self._wait_for * (back + len(view.open_tasks)) - 1e-9)
        if not back or not (enough or self._rang == view.store.head()):
            return ()
        params = moved(view.store.head_params(), self._gathered, mean=True, step=self.step)
        for contribution in self._gathered:
            device = contribution.task.device
            self._counted[device] = self._counted.get(device, 0) + 1
        self._gathered = []
        self._rounds += 1
        return (Commit(MAIN, params, back),)

    def dispatch(self, view: ServerView) -> Iterable[Assignment | Later]:
        head = view.store.head()
        if not view.idle or (head == self._begun and (self._gathered or view.open_tasks)):
            return []
        self._begun = head
        self._sent_at = {v: t for v, t in self._sent_at.items() if view.store.pins(v)}
        self._sent_at[head] = self._now
        wishes: list[Assignment | Later] = []
        arrivals = [self._arrival(task) for task in view.open_tasks.values()]
        seconds = self._seconds_for_all_epochs(view)
        for device in view.idle:
            self._since.setdefault(device, self._rounds)
            spec = self._spec(device, seconds, view.spec)
            wishes.append(Assignment(device, spec=spec))
            pace = self._pace.get(device)
            arrivals.append(None if pace is None else pace * spec.local_epochs)
        return [*wishes, *self._schedule(arrivals, head)]

    def _schedule(self, arrivals: Sequence[float | None], head: int) -> Iterable[Later]:
        self._wait_for = self.quorum
        predicted = [seconds for seconds in arrivals if seconds is not None]
        least = quota(self.quorum, len(arrivals))
        if len(predicted) < least:
            return
        count, seconds = sync_point(predicted, least)
        self._wait_for = count / len(arrivals)
        self._ends_at = self._now + seconds * (1 + self.slack)
        if seconds > 0:
            yield Later(seconds * (1 + self.slack), TimerExpired("sync", head))

    def _arrival(self, task: Task) -> float | None:
        """When a task that is out will come in, from now; None if nothing is known."""
        pace = self._pace.get(task.device)
        if pace is None:
            return None
        gone = self._now - self._sent_at[task.version]
        left = pace * task.spec.local_epochs - gone
        return left if left > 0 else gone  # overdue: as long again

    def _seconds_for_all_epochs(self, view: ServerView) -> float:
        """The time in which `quorum` of the known devices do all local epochs."""
        paces = sorted(self._pace.values())
        if not paces:
            return math.inf
        slowest = paces[quota(self.quorum, len(paces)) - 1]
        return slowest * view.spec.local_epochs

    def _spec(self, device: int, seconds: float, spec: TrainSpec) -> TrainSpec:
        if device not in self._pace:
            return spec
        epochs = fitting_epochs(self._pace[device], seconds, spec.local_epochs)
        return spec if epochs == spec.local_epochs else replace(spec, local_epochs=epochs)

    def on_timer(self, due: TimerExpired, view: ServerView) -> None:
        if due.name == "sync" and due.version == view.store.head():
            self._rang = due.version
            self._now = max(self._now, self._ends_at)

    def state(self) -> dict[str, Any]:
        return {
            "clock": [self._now, self._ends_at],
            "rounds": [self._rounds, self._begun, self._rang],
            "wait_for": self._wait_for,
            "sent_at": dict(self._sent_at),
            "pace": dict(self._pace),
            "since": dict(self._since),
            "counted": dict(self._counted),
            "gathered": list(self._gathered),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._now, self._ends_at = state["clock"]
        self._rounds, self._begun, self._rang = state["rounds"]
        self._wait_for = state["wait_for"]
        self._sent_at, self._pace = dict(state["sent_at"]), dict(state["pace"])
        self._since, self._counted = dict(state["since"]), dict(state["counted"])
        self._gathered = list(state["gathered"])


@recipe(
    "fedsea",
    "synchronises when the most updates are predicted to be in; slow devices do fewer epochs",
    "Sun et al. 2022 (FedSEA)",
)
def fedsea(
    quorum: Share = 0.5,
    slack: NotNegative = 0.1,
    balance: Proportion = 0.5,
    server_lr: Positive = 1.0,
) -> Strategy:
    """At least `quorum` of those out are waited for; `balance` 1 makes up for rarity in full."""
    rounds = Fedsea(quorum, slack, balance, server_lr)
    return Strategy(
        name="fedsea",
        weigh=rounds.weigh,
        merge=rounds,
        dispatch=rounds.dispatch,
        has_epochs=True,
    )

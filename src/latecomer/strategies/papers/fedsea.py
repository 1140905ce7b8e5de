"""Sun et al., FedSEA: A Semi-Asynchronous Federated Learning Framework for Extremely Heterogeneous
Devices, 2022.

Slow devices contribute less often, which the paper finds to cost accuracy. So slow devices train
fewer local epochs, and the server chooses the time of a commit from the predicted arrival times:
the j-th arrival a_j with the largest j / a_j. An update has the weight n_i / f_i^balance, with f_i
the share of the rounds that device i contributed to. Built from the paper's abstract: these
formulas are ours (see docs/papers.md).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from latecomer.core.messages import MAIN, Contribution, Later, Task, TimerExpired, TrainSpec
from latecomer.core.strategy import Assignment, Commit, ServerView, Stateful, Strategy
from latecomer.strategies.options import NotNegative, Positive, Proportion, Share
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.recipe import recipe

PACE_SMOOTHING = 0.5  # weight of the last task in a device's mean pace


def sync_point(arrivals: Sequence[float], min_count: int) -> tuple[int, float]:
    """The number j >= `min_count` of updates with the largest j / a_j, and a_j in seconds from now.

    `arrivals` are the predicted a_j. Of equal ratios the latest is taken.
    """
    times = sorted(arrivals)
    rate = [math.inf if t <= 0 else count / t for count, t in enumerate(times, start=1)]
    best = max(range(min_count - 1, len(times)), key=lambda i: (rate[i], i))
    return best + 1, times[best]


def fitting_epochs(pace: float, seconds: float, max_epochs: int) -> int:
    """Local epochs of `pace` seconds each that fit in `seconds`; 1 to `max_epochs`."""
    if pace <= 0:
        return max_epochs
    return min(max_epochs, max(1, math.floor(seconds / pace + 1e-9)))


class Fedsea(Stateful):
    """Merge and, by its methods, dispatch and weigh.

    A round begins with every new head. It ends with the number of updates of the best predicted
    time (`sync_point`), or when that time has passed by `slack` and there is an update. While too
    few devices have a known pace, it ends with `quorum` of the open tasks. Late updates count in
    the round of their arrival.

    The server has no clock: times, in seconds from the first round, are sums of the time at which a
    version was sent and the seconds that a task took.
    """

    kept = (
        "_now",
        "_rounds",
        "_begun",
        "_sent_at",
        "_wait_for",
        "_ends_at",
        "_expired",
        "_pace",
        "_since",
        "_counted",
        "_gathered",
    )

    def __init__(self, quorum: float, slack: float, balance: float, step: float) -> None:
        self.quorum, self.slack, self.balance, self.step = quorum, slack, balance, step
        self._now = 0.0  # seconds
        self._rounds = 0
        self._begun = -1  # the version of the last round that began
        self._sent_at: dict[int, float] = {}  # version -> time it was sent
        self._wait_for = 1.0  # share of the open tasks that ends the round
        self._ends_at = 0.0  # predicted end of the round with slack, in seconds
        self._expired = -1  # the version whose timer has expired
        self._pace: dict[int, float] = {}  # device -> mean seconds per local epoch
        self._since: dict[int, int] = {}  # device -> the round of its first task
        self._counted: dict[int, int] = {}  # device -> number of its merged updates
        self._gathered: list[Contribution] = []

    def weigh(self, contribution: Contribution, view: ServerView) -> float:
        """n_i / f_i^balance, with f_i the share of the rounds that device i contributed to."""
        device = contribution.task.device
        rounds = self._rounds - self._since[device] + 1
        frequency = min(1.0, (self._counted.get(device, 0) + 1) / rounds)
        return float(contribution.update.num_examples / frequency**self.balance)

    def add(self, contribution: Contribution, view: ServerView) -> None:
        task = contribution.task
        self._now = max(self._now, self._sent_at[task.version] + contribution.seconds)
        pace = contribution.seconds / task.spec.local_epochs
        before = self._pace.get(task.device, pace)
        self._pace[task.device] = before + PACE_SMOOTHING * (pace - before)
        self._gathered.append(contribution)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        back = len(self._gathered)
        # 0.07 * 100 is slightly above 7 in floating point; the result must be 7.
        enough = back >= math.ceil(self._wait_for * (back + len(view.open_tasks)) - 1e-9)
        if not back or not (enough or self._expired == view.store.head()):
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
        requests: list[Assignment | Later] = []
        arrivals = [self._arrival(task) for task in view.open_tasks.values()]
        seconds = self._seconds_for_all_epochs(view)
        for device in view.idle:
            self._since.setdefault(device, self._rounds)
            spec = self._spec(device, seconds, view.spec)
            requests.append(Assignment(device, spec=spec))
            pace = self._pace.get(device)
            arrivals.append(None if pace is None else pace * spec.local_epochs)
        return [*requests, *self._schedule(arrivals, head)]

    def _schedule(self, arrivals: Sequence[float | None], head: int) -> Iterable[Later]:
        self._wait_for = self.quorum
        predicted = [seconds for seconds in arrivals if seconds is not None]
        min_count = quota(self.quorum, len(arrivals))
        if len(predicted) < min_count:
            return
        count, seconds = sync_point(predicted, min_count)
        self._wait_for = count / len(arrivals)
        self._ends_at = self._now + seconds * (1 + self.slack)
        if seconds > 0:
            yield Later(seconds * (1 + self.slack), TimerExpired("sync", head))

    def _arrival(self, task: Task) -> float | None:
        """Predicted seconds until an open task arrives; None if the device's pace is unknown."""
        pace = self._pace.get(task.device)
        if pace is None:
            return None
        elapsed = self._now - self._sent_at[task.version]
        left = pace * task.spec.local_epochs - elapsed
        return left if left > 0 else elapsed  # overdue: as long again

    def _seconds_for_all_epochs(self, view: ServerView) -> float:
        """Seconds in which `quorum` of the devices with a known pace do all local epochs."""
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

    def on_timer(self, timer: TimerExpired, view: ServerView) -> None:
        if timer.name == "sync" and timer.version == view.store.head():
            self._expired = timer.version
            self._now = max(self._now, self._ends_at)


@recipe(
    "fedsea",
    "commits at the predicted time of most updates per second; slow devices train fewer epochs",
    "Sun et al. 2022 (FedSEA)",
)
def fedsea(
    quorum: Share = 0.5,
    slack: NotNegative = 0.1,
    balance: Proportion = 0.5,
    server_lr: Positive = 1.0,
) -> Strategy:
    """Options:

    quorum: smallest share of the open tasks that a round waits for.
    slack: share by which the predicted end may be exceeded before the round ends without the rest.
    balance: exponent of the weight of rare devices, 0 (none) to 1 (in proportion to their rarity).
    server_lr: factor on the averaged delta.
    """
    rounds = Fedsea(quorum, slack, balance, server_lr)
    return Strategy(
        name="fedsea",
        weigh=rounds.weigh,
        merge=rounds,
        dispatch=rounds.dispatch,
        has_epochs=True,
        varies_epochs=True,
    )

"""Wu et al., SAFA: A Semi-Asynchronous Protocol for Fast Federated Learning with Low Overhead,
2021.

All devices train, and the server picks updates after the training: the first to arrive, with
priority for devices that were not picked in the last round. The server caches the latest model w*_k
of every device, and the global model is W = sum(n_k w*_k) / sum(n_k) (Eq. 7). A device that is more
than tau versions behind is deprecated: its update is dropped, and its cached model is replaced by
the global one (Eq. 6).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, Later, TimerExpired
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Stateful, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import CountOrOff, NotNegative, Share
from latecomer.strategies.parts.merging import moved, relative_to
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


class Safa(Stateful):
    """Merge and, by its method, dispatch.

    A round ends when `quorum` of the present devices have an update and were not picked last time.
    It ends earlier when `timeout` has passed and there is an update; without a timeout, when all
    devices that were sent its model are back. `lag` is tau. A deprecated device is not interrupted:
    its update is dropped on arrival.
    """

    kept = ("_begun", "_expired", "_version", "_received", "_not_picked", "_picked", "_cache")

    def __init__(self, quorum: float, lag: int, timeout: float) -> None:
        self.quorum, self.lag, self.timeout = quorum, lag, timeout
        self._begun = -1  # the version of the last round that began
        self._expired = -1  # the version whose timer has expired
        self._version: dict[int, int] = {}  # device -> round of its model
        self._received: dict[int, Contribution] = {}  # in this round, by device in order of arrival
        self._not_picked = 0  # how many of them were not picked last time
        self._picked: set[int] = set()  # P(t-1)
        self._cache: dict[int, Contribution] = {}  # w*_k = base + delta

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        if contribution.staleness > self.lag:
            return Drop(f"its device is deprecated: more than {self.lag} versions behind")
        device = contribution.task.device
        known = self._received.get(device) or self._cache.get(device)
        if known is not None and known.task.number > contribution.task.number:
            return Drop("its device has sent a later model")
        self._version[device] = view.store.head() + 1
        self._not_picked += device not in self._received and device not in self._picked
        self._received[device] = contribution
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        head = view.store.head()
        wanted = quota(self.quorum, len(view.idle) + len(view.working))
        over = not self._awaited(view) or self._expired == head
        if not self._received or (self._not_picked < wanted and not over):
            return ()
        # Compensatory first-come-first-merge: devices that were not picked last time first.
        ordered = sorted(self._received, key=lambda device: device in self._picked)
        self._picked = set(ordered[:wanted])
        return (self._aggregate(view),)

    def _aggregate(self, view: ServerView) -> Commit:
        round_, head = view.store.head(), view.store.head_params()
        for device, version in self._version.items():
            if round_ - version > self.lag:
                self._version[device] = round_
                if (old := self._cache.get(device)) is not None:
                    self._cache[device] = _with_model(take(head, old.task.submodel), old)  # Eq. 6
        drafted = {d: c for d, c in self._received.items() if d in self._picked}
        self._cache |= drafted  # Eq. 6
        others = [c for d, c in self._cache.items() if d not in drafted]
        models = [relative_to(head, c) for c in (*drafted.values(), *others)]
        params = moved(head, models, mean=True, step=1.0)  # Eq. 7
        self._cache |= self._received  # Eq. 8: what was not drafted counts in the next round
        self._received, self._not_picked = {}, 0
        return Commit(MAIN, params, len(drafted))

    def dispatch(self, view: ServerView) -> Iterable[Assignment | Later]:
        """Every idle device gets every new head; working devices continue on their base.

        So up-to-date and (after their update) deprecated devices are synchronised with the server,
        and tolerable ones keep their model.
        """
        head = view.store.head()
        if not view.idle or (head == self._begun and (self._received or view.store.pins(head))):
            return []
        self._begun = head
        self._version.update(dict.fromkeys(view.idle, head))
        requests: list[Assignment | Later] = [Assignment(device) for device in view.idle]
        if self.timeout:
            requests.append(Later(self.timeout, TimerExpired("epoch", head)))
        return requests

    def on_timer(self, timer: TimerExpired, view: ServerView) -> None:
        if timer.name == "epoch":
            self._expired = timer.version

    def _awaited(self, view: ServerView) -> int:
        """Open tasks that the round waits for; with a timeout, all that are not deprecated."""
        head = view.store.head()
        if not self.timeout:
            return view.store.pins(head)
        if self.lag >= head:
            return len(view.open_tasks)
        return sum(view.store.pins(version) for version in range(head - self.lag, head + 1))


def _with_model(params: Tensor, contribution: Contribution) -> Contribution:
    """The cache entry of a device whose model is `params`."""
    return contribution.rebase(params, torch.zeros_like(params))


@recipe(
    "safa",
    "mean of the cached models of all devices; the first updates of a round are picked",
    "Wu et al. 2021 (SAFA)",
)
def safa(quorum: Share = 0.5, lag: CountOrOff = 5, timeout: NotNegative = 0.0) -> Strategy:
    """Options:

    quorum: the fraction C of the present devices that a round picks.
    lag: tau, the largest number of versions that a device may be behind; raise it where uploads are
        in flight for many rounds.
    timeout: T_lim, seconds after which a round ends with the updates received; 0: no bound.
    """
    rounds = Safa(quorum, lag, timeout)
    return Strategy(
        name="safa",
        weigh=by_examples(),
        merge=rounds,
        dispatch=rounds.dispatch,
        has_epochs=True,
    )

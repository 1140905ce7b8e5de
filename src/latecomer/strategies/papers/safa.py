"""Wu et al., SAFA: A Semi-Asynchronous Protocol for Fast Federated Learning with Low Overhead,
2021.

Everybody trains, and who counts is decided when the work is done: the first to come, those who did
not count last time before the others. The server keeps the latest model of every device, and the
global model is the mean of all of them. A device that is more than tau versions behind is
deprecated: what it was working on is void, and its model is replaced by the global one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, Later, TimerExpired
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import CountOrOff, NotNegative, Share
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


class Safa:
    """Merge, and dispatch by its method of that name.

    A round ends when `quorum` of the devices that are there have come in who were not picked last
    time. It waits for them until `timeout` is over and somebody is back; without one, until all
    who were sent its model are back. `lag` is tau. Devices are not interrupted: one that is
    deprecated learns of it when its update is dropped.
    """

    def __init__(self, quorum: float, lag: int, timeout: float) -> None:
        self.quorum, self.lag, self.timeout = quorum, lag, timeout
        self._begun = -1
        self._expired = -1
        self._version: dict[int, int] = {}  # device -> round of the model it has
        self._back: dict[int, Contribution] = {}  # what came in this round, the first first
        self._first = 0  # how many of them were not picked last time
        self._picked: set[int] = set()  # P(t-1)
        self._cache: dict[int, Contribution] = {}  # w*_k = base + delta

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        if contribution.staleness > self.lag:
            return Drop(f"its device is deprecated: more than {self.lag} versions behind")
        device = contribution.task.device
        known = self._back.get(device) or self._cache.get(device)
        if known is not None and known.task.number > contribution.task.number:
            return Drop("its device has sent a later model")
        self._version[device] = view.store.head() + 1
        self._first += device not in self._back and device not in self._picked
        self._back[device] = contribution
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        head = view.store.head()
        known = len(view.idle) + len(view.working)
        wanted = quota(self.quorum, known)
        over = not self._awaited(view) or self._expired == head
        if not self._back or (self._first < wanted and not over):
            return ()
        # Compensatory first-come-first-merge: who was not picked last time goes first.
        by_turns = sorted(self._back, key=lambda device: device in self._picked)
        self._picked = set(by_turns[:wanted])
        return (self._aggregate(view),)

    def _aggregate(self, view: ServerView) -> Commit:
        round_, head = view.store.head(), view.store.head_params()
        for device, version in self._version.items():
            if round_ - version > self.lag:
                self._version[device] = round_
                if (old := self._cache.get(device)) is not None:
                    self._cache[device] = _at(take(head, old.task.submodel), old)  # Eq. 6
        drafted = {d: c for d, c in self._back.items() if d in self._picked}
        self._cache |= drafted  # Eq. 6
        others = [c for d, c in self._cache.items() if d not in drafted]
        models = [_seen_from(head, c) for c in (*drafted.values(), *others)]
        params = moved(head, models, mean=True, step=1.0)  # Eq. 7
        self._cache |= self._back  # Eq. 8: what was not drafted counts in the next round
        self._back, self._first = {}, 0
        return Commit(MAIN, params, len(drafted))

    def dispatch(self, view: ServerView) -> Iterable[Assignment | Later]:
        """With every new head, all who wait get it. Who is at work goes on with what it has.

        So the up-to-date and, once they are back, the deprecated are in step with the server, and
        the tolerable stay as they are.
        """
        head = view.store.head()
        if not view.idle or (head == self._begun and (self._back or view.store.pins(head))):
            return []
        self._begun = head
        self._version.update(dict.fromkeys(view.idle, head))
        wishes: list[Assignment | Later] = [Assignment(device) for device in view.idle]
        if self.timeout:
            wishes.append(Later(self.timeout, TimerExpired("epoch", head)))
        return wishes

    def on_timer(self, due: TimerExpired, view: ServerView) -> None:
        if due.name == "epoch":
            self._expired = due.version

    def _awaited(self, view: ServerView) -> int:
        """How many are out whom the round waits for; with a time limit, all who may count."""
        head = view.store.head()
        if not self.timeout:
            return view.store.pins(head)
        if self.lag >= head:
            return len(view.open_tasks)
        return sum(view.store.pins(version) for version in range(head - self.lag, head + 1))

    def state(self) -> dict[str, Any]:
        return {
            "begun": self._begun,
            "expired": self._expired,
            "version": dict(self._version),
            "back": dict(self._back),
            "first": self._first,
            "picked": sorted(self._picked),
            "cache": dict(self._cache),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._begun, self._expired = state["begun"], state["expired"]
        self._version, self._back = dict(state["version"]), dict(state["back"])
        self._first = state["first"]
        self._picked, self._cache = set(state["picked"]), dict(state["cache"])


def _at(params: Tensor, contribution: Contribution) -> Contribution:
    """The entry of a device whose model is `params`."""
    return contribution.rebase(params, torch.zeros_like(params))


def _seen_from(head: Tensor, contribution: Contribution) -> Contribution:
    """The same model as a step from `head`; its own delta, bit for bit, if that is its base."""
    head = take(head, contribution.task.submodel)
    return contribution.rebase(head, (contribution.base - head) + contribution.delta)


@recipe(
    "safa",
    "mean of every device's latest model; the first to come count, by turns",
    "Wu et al. 2021 (SAFA)",
)
def safa(quorum: Share = 0.5, lag: CountOrOff = 5, timeout: NotNegative = 0.0) -> Strategy:
    """`quorum` is the fraction C, `lag` is tau, `timeout` T_lim; 0 waits as long as it takes."""
    rounds = Safa(quorum, lag, timeout)
    return Strategy(
        name="safa",
        weigh=by_examples(),
        merge=rounds,
        dispatch=rounds.dispatch,
        has_epochs=True,
    )

"""Chai et al., FedAT: A High-Performance and Communication-Efficient Federated Learning System with
Asynchronous Tiers, 2021.

Devices of similar speed form a tier. Each tier runs synchronous FedAvg rounds at its own pace, and
the global model is the mean of the tiers' latest models weighted by their numbers of devices
(Asyn-Tiers, as FedDC compares with it, section 8). The paper measures every device beforehand.
Here all devices start in the fastest tier, and a device that misses the end of a round moves down
by one tier.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import MAIN, Contribution
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Stateful, Strategy
from latecomer.strategies.options import Count, Share
from latecomer.strategies.parts.merging import moved, relative_to, trained_by
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


@portable
@dataclass
class Round:
    """The devices of one tier that were sent one version: those still pending, and the updates."""

    base: Tensor
    pending: set[int] = field(default_factory=set)
    updates: list[Contribution] = field(default_factory=list)


@portable
@dataclass
class TierModel:
    """A tier's latest model, and the mask of the coordinates that it has ever trained."""

    params: Tensor
    trained: Tensor

    def move(self, towards: Tensor, covered: Tensor, share: float) -> None:
        """Interpolate by `share` on the covered coordinates, by 1 on those trained first now."""
        step = covered * torch.where(self.trained, share, 1.0)
        self.params = torch.lerp(self.params, towards, step)
        self.trained = self.trained | covered


def mean_of_tiers(head: Tensor, tiers: Iterable[tuple[int, TierModel]], covered: Tensor) -> Tensor:
    """The mean by number of devices, per coordinate over the tiers that have ever trained it.

    Coordinates that are not covered keep the value of the head.
    """
    result, total = head, torch.zeros_like(head)
    for devices, tier in tiers:
        weight = devices * (tier.trained & covered)
        total += weight
        result = torch.lerp(result, tier.params, weight / total.clamp(min=1))
    return result


class Tiers(Stateful):
    """Merge and, by its method, dispatch: synchronous rounds within each tier.

    A round ends when no device of it is pending, or when `quorum` of its devices are back and the
    tier keeps an equal part of all devices that are not in a faster one without the pending ones.
    Hence the slowest tier waits for all its devices. Pending devices then move down one tier with
    their open tasks, and never up: a late update counts in the new tier's round of the version it
    was sent. Lost tasks no longer count.
    """

    kept = ("_tier", "_lost", "_begun", "_rounds", "_models")

    def __init__(self, tiers: int, quorum: float) -> None:
        self.tiers, self.quorum = tiers, quorum
        self._tier: dict[int, int] = {}  # device -> its tier, 0 is the fastest
        self._lost: set[int] = set()  # devices whose task was lost, until their next task
        self._begun = [-1] * tiers  # by tier: the version of its last round
        self._rounds: dict[tuple[int, int], Round] = {}  # by tier and version
        self._models: dict[int, TierModel] = {}

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        task = contribution.task
        its_round = self._rounds.get((self._tier[task.device], task.version))
        if its_round is None:
            return Drop("its round is closed")  # compensation took time, and the task was removed
        its_round.pending.discard(task.device)
        its_round.updates.append(contribution)
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        self._remove_lost(view)
        ended: set[int] = set()
        covered: list[Tensor] = []
        contributions = 0
        while (key := self._complete_round()) is not None:
            for device in list(self._rounds[key].pending):
                self._move_down(device)
            contributions += len(self._rounds[key].updates)
            covered.append(self._end(key, view))
            ended.add(key[0])
        if not ended:
            return ()
        devices = self._count_devices()
        weighted = [(devices[t] or int(t in ended), model) for t, model in self._models.items()]
        params = mean_of_tiers(view.store.head_params(), weighted, torch.stack(covered).any(0))
        return (Commit(MAIN, params, contributions),)

    def dispatch(self, view: ServerView) -> Iterable[Assignment]:
        """A tier begins a round when none of its devices works and there is a new head.

        Uploads may be in flight meanwhile: then several of its rounds are open.
        """
        head = view.store.head()
        working = {self._tier[device] for device in view.working}
        begin = {
            tier
            for tier in range(self.tiers)
            if tier not in working
            and (self._begun[tier] != head or (tier, head) not in self._rounds)
        }
        chosen = [device for device in view.idle if self._tier.setdefault(device, 0) in begin]
        for device in chosen:
            tier = self._tier[device]
            self._begun[tier] = head
            new = self._rounds.setdefault((tier, head), Round(view.store.head_params()))
            new.pending.add(device)
            self._lost.discard(device)
        return [Assignment(device) for device in chosen]

    def _complete_round(self) -> tuple[int, int] | None:
        """Tier and version of a round that ends now."""
        return next((key for key in sorted(self._rounds) if self._is_complete(*key)), None)

    def _is_complete(self, tier: int, version: int) -> bool:
        its_round = self._rounds[tier, version]
        pending, back = len(its_round.pending), len(its_round.updates)
        if not pending or back < quota(self.quorum, back + pending):
            return not pending
        devices = self._count_devices()
        not_faster = sum(devices[t] for t in range(tier, self.tiers))
        return devices[tier] - pending >= not_faster / (self.tiers - tier)

    def _end(self, key: tuple[int, int], view: ServerView) -> Tensor:
        """Close the round and update its tier's model; returns the mask of trained coordinates."""
        ended, tier = self._rounds.pop(key), key[0]
        updates = [relative_to(ended.base, contribution) for contribution in ended.updates]
        params = moved(ended.base, updates, mean=True, step=1.0)
        covered = trained_by(ended.updates, params)
        if covered is None:
            covered = torch.ones_like(params, dtype=torch.bool)
        # A round of some devices of the tier moves its model by their share of the tier.
        merged = {contribution.task.device for contribution in ended.updates}
        present = {d for (t, _), other in self._rounds.items() if t == tier for d in other.pending}
        present |= {device for device in view.idle if self._tier.get(device) == tier}
        model = self._models.setdefault(tier, TierModel(ended.base, torch.zeros_like(covered)))
        model.move(params, covered, len(merged) / len(merged | present))
        return covered

    def _move_down(self, device: int) -> None:
        tier = self._tier[device]
        self._tier[device] = tier + 1
        for (its_tier, version), its_round in list(self._rounds.items()):
            if its_tier == tier and device in its_round.pending:
                its_round.pending.discard(device)
                lower = self._rounds.setdefault((tier + 1, version), Round(its_round.base))
                lower.pending.add(device)
        self._remove_empty_rounds()

    def _remove_lost(self, view: ServerView) -> None:
        """Remove devices from `pending` whose task is no longer open."""
        pending = Counter[int]()
        for (_, version), its_round in self._rounds.items():
            pending[version] += len(its_round.pending)
        if all(view.store.pins(version) == count for version, count in pending.items()):
            return
        still_open = {(task.version, task.device) for task in view.open_tasks.values()}
        for (_, version), its_round in self._rounds.items():
            lost = {device for device in its_round.pending if (version, device) not in still_open}
            its_round.pending -= lost
            self._lost |= lost
        self._remove_empty_rounds()

    def _remove_empty_rounds(self) -> None:
        self._rounds = {key: r for key, r in self._rounds.items() if r.pending or r.updates}

    def _count_devices(self) -> Counter[int]:
        """Tier -> the number of its devices."""
        return Counter(tier for device, tier in self._tier.items() if device not in self._lost)


@recipe(
    "asyn-tiers",
    "synchronous rounds within tiers of similar speed, each tier at its own pace",
    "Chai et al. 2021 (FedAT)",
)
def asyn_tiers(tiers: Count = 3, quorum: Share = 0.7) -> Strategy:
    """Options:

    tiers: largest number of tiers; raise it for fleets with more speed classes.
    quorum: share of a tier's round that may close it; the other devices move down one tier.

    Every tier commits, so commits are not epochs: a run is bounded by the fleet's nominal epochs.
    """
    rounds = Tiers(tiers, quorum)
    return Strategy(name="asyn-tiers", weigh=by_examples(), merge=rounds, dispatch=rounds.dispatch)

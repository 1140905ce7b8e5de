"""Chai et al., FedAT: A High-Performance and Communication-Efficient Federated Learning System with
Asynchronous Tiers, 2021.

As FedDC compares with it (Asyn-Tiers, section 8): synchronous FedAvg among devices of like speed,
and the global model is the mean of the tiers' latest models, weighted by their numbers of devices.
The paper measures every device beforehand. Here tiers are found on the way: all begin in the
fastest, and whoever misses the end of a round moves down by one.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution
from latecomer.core.strategy import Assignment, Commit, Drop, ServerView, Strategy
from latecomer.strategies.options import Count, Share
from latecomer.strategies.parts.merging import moved, trained_by
from latecomer.strategies.parts.quota import quota
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


@dataclass
class Round:
    """The devices of one tier that were sent one version: who is out, and what came back."""

    base: Tensor
    out: set[int] = field(default_factory=set)
    back: list[Contribution] = field(default_factory=list)


@dataclass
class TierModel:
    """A tier's latest model, and the coordinates that it has ever trained."""

    params: Tensor
    trained: Tensor

    def move(self, towards: Tensor, covered: Tensor, share: float) -> None:
        """Go `share` of the way on the covered coordinates; all of it where this is the first."""
        step = covered * torch.where(self.trained, share, 1.0)
        self.params = torch.lerp(self.params, towards, step)
        self.trained = self.trained | covered


def mean_of_tiers(head: Tensor, tiers: Iterable[tuple[int, TierModel]], covered: Tensor) -> Tensor:
    """The mean by number of devices, over the tiers that have ever trained a coordinate.

    What is not covered stays as it is in the head.
    """
    result, total = head, torch.zeros_like(head)
    for devices, tier in tiers:
        weight = devices * (tier.trained & covered)
        total += weight
        result = torch.lerp(result, tier.params, weight / total.clamp(min=1))
    return result


class Tiers:
    """Merge, and dispatch by its method of that name: rounds within tiers, each at its own pace.

    A round ends when nobody is out, or when `quorum` of it are back and the tier can spare the
    others: it keeps an equal part of all devices that are not in a faster one. Hence the slowest
    tier waits for everybody. Who is out moves down with its open tasks, and never up again: a
    late update counts in the new tier's round of the version it was sent. Lost devices no longer
    count.
    """

    def __init__(self, tiers: int, quorum: float) -> None:
        self.tiers, self.quorum = tiers, quorum
        self._tier: dict[int, int] = {}  # device -> its tier, 0 is the fastest
        self._lost: set[int] = set()  # devices whose task was lost, until they take the next
        self._begun = [-1] * tiers  # the version with which each tier last began a round
        self._rounds: dict[tuple[int, int], Round] = {}  # by tier and version
        self._models: dict[int, TierModel] = {}

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        task = contribution.task
        among = self._rounds.get((self._tier[task.device], task.version))
        if among is None:
            return Drop("its round is closed")  # a repair took time, and it was given up for lost
        among.out.discard(task.device)
        among.back.append(contribution)
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        self._let_go_of_the_lost(view)
        ended: set[int] = set()
        covered: list[Tensor] = []
        contributions = 0
        while (due := self._due()) is not None:
            for device in list(self._rounds[due].out):
                self._move_down(device)
            contributions += len(self._rounds[due].back)
            covered.append(self._end(due, view))
            ended.add(due[0])
        if not ended:
            return ()
        devices = self._devices()
        votes = [(devices[t] or int(t in ended), model) for t, model in self._models.items()]
        params = mean_of_tiers(view.store.head_params(), votes, torch.stack(covered).any(0))
        return (Commit(MAIN, params, contributions),)

    def dispatch(self, view: ServerView) -> Iterable[Assignment]:
        """A tier begins a round when none of its devices is at work and there is a new head.

        Uploads may be in flight meanwhile: then several of its rounds are open.
        """
        head = view.store.head()
        at_work = {self._tier[device] for device in view.working}
        begin = {
            tier
            for tier in range(self.tiers)
            if tier not in at_work
            and (self._begun[tier] != head or (tier, head) not in self._rounds)
        }
        chosen = [device for device in view.idle if self._tier.setdefault(device, 0) in begin]
        for device in chosen:
            tier = self._tier[device]
            self._begun[tier] = head
            among = self._rounds.setdefault((tier, head), Round(view.store.head_params()))
            among.out.add(device)
            self._lost.discard(device)
        return [Assignment(device) for device in chosen]

    def _due(self) -> tuple[int, int] | None:
        """A round that ends now."""
        return next((key for key in sorted(self._rounds) if self._is_due(*key)), None)

    def _is_due(self, tier: int, version: int) -> bool:
        among = self._rounds[tier, version]
        out, back = len(among.out), len(among.back)
        if not out or back < quota(self.quorum, back + out):
            return not out
        devices = self._devices()
        not_faster = sum(devices[t] for t in range(tier, self.tiers))
        return devices[tier] - out >= not_faster / (self.tiers - tier)

    def _end(self, key: tuple[int, int], view: ServerView) -> Tensor:
        """Close the round and move its tier's model; returns which coordinates were trained."""
        ended, tier = self._rounds.pop(key), key[0]
        params = moved(ended.base, ended.back, mean=True, step=1.0)
        covered = trained_by(ended.back, params)
        if covered is None:
            covered = torch.ones_like(params, dtype=torch.bool)
        # While a tier is not yet in step, a round speaks only for the devices that are in it.
        voices = {contribution.task.device for contribution in ended.back}
        present = {d for (t, _), among in self._rounds.items() if t == tier for d in among.out}
        present |= {device for device in view.idle if self._tier.get(device) == tier}
        model = self._models.setdefault(tier, TierModel(ended.base, torch.zeros_like(covered)))
        model.move(params, covered, len(voices) / len(voices | present))
        return covered

    def _move_down(self, device: int) -> None:
        tier = self._tier[device]
        self._tier[device] = tier + 1
        for (its_tier, version), among in list(self._rounds.items()):
            if its_tier == tier and device in among.out:
                among.out.discard(device)
                lower = self._rounds.setdefault((tier + 1, version), Round(among.base))
                lower.out.add(device)
        self._tidy()

    def _let_go_of_the_lost(self, view: ServerView) -> None:
        out = Counter[int]()
        for (_, version), among in self._rounds.items():
            out[version] += len(among.out)
        if all(view.store.pins(version) == count for version, count in out.items()):
            return
        still_open = {(task.version, task.device) for task in view.open_tasks.values()}
        for (_, version), among in self._rounds.items():
            lost = {device for device in among.out if (version, device) not in still_open}
            among.out -= lost
            self._lost |= lost
        self._tidy()

    def _tidy(self) -> None:
        self._rounds = {
            key: among for key, among in self._rounds.items() if among.out or among.back
        }

    def _devices(self) -> Counter[int]:
        """Tier -> the number of its devices."""
        return Counter(tier for device, tier in self._tier.items() if device not in self._lost)

    def state(self) -> dict[str, Any]:
        return {
            "tier": dict(self._tier),
            "lost": sorted(self._lost),
            "begun": list(self._begun),
            "rounds": [
                [*key, among.base, sorted(among.out), among.back]
                for key, among in self._rounds.items()
            ],
            "models": {tier: [model.params, model.trained] for tier, model in self._models.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tier = dict(state["tier"])
        self._lost, self._begun = set(state["lost"]), list(state["begun"])
        self._rounds = {
            (tier, version): Round(base, set(out), list(back))
            for tier, version, base, out, back in state["rounds"]
        }
        self._models = {tier: TierModel(*fields) for tier, fields in state["models"].items()}


@recipe(
    "asyn-tiers",
    "synchronous rounds within tiers of like speed, which go on at their own pace",
    "Chai et al. 2021 (FedAT)",
)
def asyn_tiers(tiers: Count = 3, quorum: Share = 0.7) -> Strategy:
    """At most so many `tiers`; a round ends when `quorum` of its tier are back.

    It has no epochs: every tier commits, so a run is bounded by the fleet's nominal ones.
    """
    rounds = Tiers(tiers, quorum)
    return Strategy(name="asyn-tiers", weigh=by_examples(), merge=rounds, dispatch=rounds.dispatch)

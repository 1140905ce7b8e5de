"""Selection: which idle devices get a task when an epoch or a synchronous round begins."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful, Strategy, selection_rng
from latecomer.strategies.parts.quota import quota

Select = Callable[[ServerView], list[int]]
SelectName = Literal["random", "oort"]


def all_idle(view: ServerView) -> list[int]:
    """Select: every idle device."""
    return list(view.idle)


def random_share(fraction: float) -> Select:
    """Select: idle devices at random, as many as `fraction` of all present devices."""
    return lambda view: view.idle.sample(selection_size(fraction, view), selection_rng(view))


def selection_size(fraction: float, view: ServerView) -> int:
    """`fraction` of the idle and working devices, rounded up; at least one."""
    return quota(fraction, len(view.idle) + len(view.working))


@portable
@dataclass(slots=True)
class DeviceRecord:
    """What Oort keeps of a device with an update."""

    utility: float  # U(i), of its last update
    seconds: float  # t_i, of its last task
    last: int  # L(i), the round of its last update
    updates: int


class Oort(Stateful):
    """Select: devices with a high loss and short tasks, and a share of devices without an update.

    Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, 2021,
    Algorithm 1. Devices are drawn by Util(i) = (U(i) + sqrt(0.1 log R / L(i))) * (T / t_i)^alpha,
    the last factor only where t_i > T; R is the round.

    `explore` is the share of devices without an update (epsilon), multiplied by `decay` every round
    down to `explore_min`. T is the `pace` quantile of the task times; the pacer raises `pace` by
    `step` after `window` rounds with less utility than the `window` before. `penalty` is alpha. A
    device with more than `max_participations` updates is no longer selected (0: no bound), which
    excludes at most 30% of the devices.

    `overcommit` times `fraction` of the present devices are selected; `quorum` is the share of them
    that ends the round.
    """

    kept = ("explore", "pace", "quorum", "_round", "_records", "_utilities", "_history")

    def __init__(
        self,
        fraction: float,
        overcommit: float = 1.0,
        explore: float = 0.9,
        decay: float = 0.98,
        explore_min: float = 0.2,
        penalty: float = 2.0,
        pace: float = 0.3,
        step: float = 0.05,
        window: int = 20,
        max_participations: int = 0,
    ) -> None:
        self.fraction, self.overcommit = fraction, overcommit
        self.explore, self.decay, self.explore_min = explore, decay, explore_min
        self.penalty, self.pace, self.step, self.window = penalty, pace, step, window
        self.max_participations = max_participations
        self.quorum = 1.0
        self._round = 0
        self._records: dict[int, DeviceRecord] = {}
        self._utilities: list[float] = []  # of the updates since the last selection
        self._history: list[float] = []  # their mean in each of the last 2 W rounds

    def on_arrival(self, contribution: Contribution, view: ServerView) -> None:
        device = contribution.task.device
        known = self._records.get(device)
        utility = statistical_utility(contribution)
        self._records[device] = DeviceRecord(
            utility, contribution.seconds, max(1, self._round), known.updates + 1 if known else 1
        )
        self._utilities.append(utility)

    def __call__(self, view: ServerView) -> list[int]:
        self._begin_round()
        needed = selection_size(self.fraction, view)
        count = math.floor(self.overcommit * needed + 1e-9)
        if count >= len(view.idle):
            chosen = all_idle(view)
        else:
            chosen = self._choose(sorted(view.idle), count, selection_rng(view))
        self.quorum = min(1.0, needed / max(1, len(chosen)))
        return chosen

    def _begin_round(self) -> None:
        self._round += 1
        if self._round > 1:
            self.explore = max(self.explore_min, self.explore * self.decay)
            new = self._utilities
            self._history.append(math.fsum(new) / len(new) if new else 0.0)
            self._utilities = []
        del self._history[: -2 * self.window]
        if self._round % self.window == 0 and len(self._history) == 2 * self.window:
            before, recent = self._history[: self.window], self._history[self.window :]
            if math.fsum(before) > math.fsum(recent):
                self.pace = min(1.0, self.pace + self.step)  # the pacer: T <- T + Delta

    def _choose(self, idle: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
        excluded = self._excluded()
        known = [d for d in idle if d in self._records and d not in excluded]
        unknown = [d for d in idle if d not in self._records]
        reserve = [d for d in idle if d in excluded]
        exploited = min(math.floor((1 - self.explore) * count + 1e-9), len(known))
        exploited = max(exploited, min(len(known), count - len(unknown)))
        chosen = self._exploit(known, exploited, rng)
        for group in (unknown, reserve):  # at random: the speed of unknown devices is not known
            room = min(count - len(chosen), len(group))
            chosen += [int(d) for d in rng.choice(group, room, replace=False)] if room else []
        return chosen

    def _exploit(self, known: list[int], count: int, rng: np.random.Generator) -> list[int]:
        if not count:
            return []
        scores = self.scores(known)
        ranked = sorted(known, key=lambda device: -scores[device])
        cut = 0.95 * scores[ranked[count - 1]]  # c = 95% of the cut-off utility
        admitted = [device for device in ranked if scores[device] >= cut]
        odds = np.maximum([scores[device] for device in admitted], 1e-9)
        drawn = rng.choice(admitted, count, replace=False, p=odds / odds.sum())
        return [int(device) for device in drawn]

    def scores(self, devices: Sequence[int]) -> dict[int, float]:
        """Util(i) of devices with an update, U in units of its 95% quantile."""
        records = self._records
        highest = percentile([records[d].utility for d in devices], 0.95) or 1.0
        limit = math.inf
        if self.pace < 1.0:
            limit = percentile([known.seconds for known in records.values()], self.pace)
        uncertain = 0.1 * math.log(self._round)
        found = {}
        for device in devices:
            known = records[device]
            score = min(known.utility, highest) / highest  # U(i), clipped
            score += math.sqrt(uncertain / known.last)  # temporal uncertainty
            if known.seconds > limit:
                score *= (limit / known.seconds) ** self.penalty  # Eq. 1: (T / t_i)^alpha
            found[device] = score
        return found

    def _excluded(self) -> set[int]:
        """The devices with too many updates, at most 30% of those with an update."""
        if not self.max_participations:
            return set()
        often = [d for d, known in self._records.items() if known.updates > self.max_participations]
        often.sort(key=lambda device: (-self._records[device].updates, device))
        return set(often[: int(0.3 * len(self._records))])


def statistical_utility(contribution: Contribution) -> float:
    """U(i) = |B| sqrt(1/|B| sum of squared losses), Oort's Eq. 1.

    The loss is an approximation of the gradient norm. For a client that does not report it, the
    norm of the delta is used.
    """
    update = contribution.update
    loss = update.metrics.get("loss_rms")
    if loss is None:
        loss = torch.linalg.vector_norm(contribution.delta).item()
    return update.num_examples * min(max(float(loss), 0.0), 1e200)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 without values."""
    return sorted(values)[quota(share, len(values)) - 1] if values else 0.0


def selector(name: SelectName, fraction: float) -> Select:
    """The select part of that name."""
    return Oort(fraction) if name == "oort" else random_share(fraction)


def with_reported_loss(strategy: Strategy, select: Select) -> Strategy:
    """The strategy with devices that report their loss before training, if `select` is Oort."""
    if not isinstance(select, Oort):
        return strategy
    prepare = strategy.prepare
    return replace(strategy, prepare=lambda spec: replace(prepare(spec), report_loss=True))

"""Parts that select: who of the waiting devices is given a task when an epoch begins."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Strategy, selection_rng
from latecomer.errors import BadInput
from latecomer.strategies.parts.quota import quota

Select = Callable[[ServerView], list[int]]
SelectName = Literal["everyone", "random", "round-robin", "oort"]


def everyone(view: ServerView) -> list[int]:
    """Select: all who wait."""
    return list(view.idle)


def some(fraction: float) -> Select:
    """Select: a random share of all known devices, out of those who wait."""
    return lambda view: view.idle.sample(wanted(fraction, view), selection_rng(view))


def wanted(fraction: float, view: ServerView) -> int:
    """How many devices are that share of all that wait or work; at least one."""
    known = len(view.idle) + len(view.working)
    return quota(fraction, known)


class RoundRobin:
    """Select: a share of all known devices, by turns in the order of their numbers."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._last = -1

    def __call__(self, view: ServerView) -> list[int]:
        count = wanted(self.fraction, view)
        if count >= len(view.idle):
            return everyone(view)
        chosen = sorted(view.idle, key=lambda device: (device <= self._last, device))[:count]
        self._last = chosen[-1]
        return chosen

    def state(self) -> dict[str, Any]:
        return {"last": self._last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._last = state["last"]


@dataclass(slots=True)
class Heard:
    """What Oort knows of a device: U(i), t_i, L(i), and how often it has been heard."""

    utility: float
    seconds: float
    last: int
    times: int


class Oort:
    """Select: devices of much use and short tasks, and now and then one never heard of.

    Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, 2021,
    Algorithm 1. `explore` is the share of devices never heard of (epsilon), `decay` its factor per
    round, down to `least`. T, the time a task may take, is the one that a share `pace` of the
    devices keep; the pacer raises it by `step` after every `window` rounds of less use than the
    ones before. `penalty` is alpha. A device heard more than `most_turns` times is selected no
    more (0: no bound), as long as this leaves out no more than 30%.

    `overcommit` times as many as wanted are selected; `quorum` is the share to wait for.
    """

    def __init__(
        self,
        fraction: float,
        overcommit: float = 1.0,
        explore: float = 0.9,
        decay: float = 0.98,
        least: float = 0.2,
        penalty: float = 2.0,
        pace: float = 0.3,
        step: float = 0.05,
        window: int = 20,
        most_turns: int = 0,
    ) -> None:
        self.fraction, self.overcommit = fraction, overcommit
        self.explore, self.decay, self.least = explore, decay, least
        self.penalty, self.pace, self.step, self.window = penalty, pace, step, window
        self.most_turns = most_turns
        self.quorum = 1.0
        self._round = 0
        self._heard: dict[int, Heard] = {}
        self._came: list[float] = []  # the utilities that came in since the last selection
        self._history: list[float] = []  # their mean in each of the last 2 W rounds

    def on_arrival(self, contribution: Contribution, view: ServerView) -> None:
        device = contribution.task.device
        known = self._heard.get(device)
        utility = statistical_utility(contribution)
        times = 1 if known is None else known.times + 1
        self._heard[device] = Heard(utility, contribution.seconds, max(1, self._round), times)
        self._came.append(utility)

    def __call__(self, view: ServerView) -> list[int]:
        self._begin_round()
        want = wanted(self.fraction, view)
        count = math.floor(self.overcommit * want + 1e-9)
        if count >= len(view.idle):
            chosen = everyone(view)
        else:
            chosen = self._choose(sorted(view.idle), count, selection_rng(view))
        self.quorum = min(1.0, want / max(1, len(chosen)))
        return chosen

    def _begin_round(self) -> None:
        self._round += 1
        if self._round > 1:
            self.explore = max(self.least, self.explore * self.decay)
            came = self._came
            self._history.append(math.fsum(came) / len(came) if came else 0.0)
            self._came = []
        del self._history[: -2 * self.window]
        if self._round % self.window == 0 and len(self._history) == 2 * self.window:
            before, lately = self._history[: self.window], self._history[self.window :]
            if math.fsum(before) > math.fsum(lately):
                self.pace = min(1.0, self.pace + self.step)  # the pacer: T <- T + Delta

    def _choose(self, idle: Sequence[int], count: int, rng: np.random.Generator) -> list[int]:
        barred = self._barred()
        known = [d for d in idle if d in self._heard and d not in barred]
        unknown = [d for d in idle if d not in self._heard]
        spared = [d for d in idle if d in barred]
        exploited = min(math.floor((1 - self.explore) * count + 1e-9), len(known))
        exploited = max(exploited, min(len(known), count - len(unknown)))
        chosen = self._exploit(known, exploited, rng)
        for group in (unknown, spared):  # nothing tells how fast an unknown one is
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
        """Util(i) of devices that were heard, U as a share of the largest one that counts."""
        heard = self._heard
        highest = percentile([heard[d].utility for d in devices], 0.95) or 1.0
        limit = math.inf
        if self.pace < 1.0:
            limit = percentile([known.seconds for known in heard.values()], self.pace)
        uncertain = 0.1 * math.log(self._round)
        found = {}
        for device in devices:
            it = heard[device]
            score = min(it.utility, highest) / highest  # U(i), clipped
            score += math.sqrt(uncertain / it.last)  # temporal uncertainty
            if it.seconds > limit:
                score *= (limit / it.seconds) ** self.penalty  # Eq. 1: (T / t_i)^alpha
            found[device] = score
        return found

    def _barred(self) -> set[int]:
        """Those heard too often, the most frequent first."""
        if not self.most_turns:
            return set()
        often = [d for d, known in self._heard.items() if known.times > self.most_turns]
        often.sort(key=lambda device: (-self._heard[device].times, device))
        return set(often[: int(0.3 * len(self._heard))])

    def state(self) -> dict[str, Any]:
        return {
            "explore": self.explore,
            "pace": self.pace,
            "quorum": self.quorum,
            "round": self._round,
            "heard": {device: list(astuple(known)) for device, known in self._heard.items()},
            "came": list(self._came),
            "history": list(self._history),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.explore, self.pace, self.quorum = state["explore"], state["pace"], state["quorum"]
        self._round = state["round"]
        self._heard = {device: Heard(*known) for device, known in state["heard"].items()}
        self._came, self._history = list(state["came"]), list(state["history"])


def statistical_utility(contribution: Contribution) -> float:
    """|B| sqrt(1/|B| sum of squared losses), Oort's Eq. 1.

    The loss stands for the norm of the gradient there. Where a client does not report it, the norm
    of its delta does.
    """
    update = contribution.update
    loss = update.metrics.get("loss_rms")
    if loss is None:
        loss = torch.linalg.vector_norm(contribution.delta).item()
    return update.num_examples * min(max(float(loss), 0.0), 1e200)


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of them do not exceed; 0 of none."""
    return sorted(values)[quota(share, len(values)) - 1] if values else 0.0


def selector(name: SelectName, fraction: float) -> Select:
    """The select part of that name."""
    match name:
        case "everyone":
            if fraction != 1.0:
                raise BadInput(f"fraction = {fraction:g}: select = 'everyone' leaves nobody out")
            return everyone
        case "random":
            return some(fraction)
        case "round-robin":
            return RoundRobin(fraction)
        case "oort":
            return Oort(fraction)


def with_reported_loss(strategy: Strategy, select: Select) -> Strategy:
    """The strategy whose devices report their loss before training, if `select` uses it (Oort)."""
    if not isinstance(select, Oort):
        return strategy
    prepare = strategy.prepare
    return replace(strategy, prepare=lambda spec: replace(prepare(spec), report_loss=True))

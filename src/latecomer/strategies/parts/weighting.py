"""Parts for the *weigh* slot: the weight of an update from its staleness and number of examples.

A weight is computed from each contribution alone and never multiplied into the next one. A part may
keep facts about the fleet, such as the number of examples of every device.
"""

import math
from collections.abc import Callable

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful, Weigh

Decay = Callable[[int], float]


def constant() -> Decay:
    """s(tau) = 1: staleness is ignored."""
    return lambda staleness: 1.0


def polynomial(p: float) -> Decay:
    """s(tau) = (1 + tau)^-p. FedAsync, section 5.2."""
    return lambda staleness: float((1.0 + staleness) ** -p)


def hinge(p: float, b: float) -> Decay:
    """s(tau) = 1 up to b, then 1 / (p (tau - b) + 1). FedAsync, section 5.2."""
    return lambda staleness: 1.0 if staleness <= b else 1.0 / (p * (staleness - b) + 1.0)


def reciprocal(a: float, b: float) -> Decay:
    """s(tau) = 1 up to b, then 1 / (a (tau - b)), never above 1. PrivaAsyncFed, Eq. 16, bounded."""
    return lambda staleness: 1.0 if a * (staleness - b) <= 1.0 else 1.0 / (a * (staleness - b))


def sigmoid(a: float, b: float) -> Decay:
    """s(tau) = 1 / (1 + exp(a (tau - b))). FedDC, section 8.1."""

    def decay(staleness: int) -> float:
        # Past 700 exp() overflows; the weight is 0 there to any precision.
        return 1.0 / (1.0 + math.exp(min(a * (staleness - b), 700.0)))

    return decay


def by_staleness(decay: Decay, scale: float = 1.0) -> Weigh:
    """scale * s(tau)."""

    def weigh(contribution: Contribution, view: ServerView) -> float:
        return scale * decay(contribution.staleness)

    return weigh


def by_examples(decay: Decay | None = None) -> Weigh:
    """n_i, or n_i * s(tau)."""

    def weigh(contribution: Contribution, view: ServerView) -> float:
        share = float(contribution.update.num_examples)
        return share if decay is None else share * decay(contribution.staleness)

    return weigh


class ByShareOfExamples(Stateful):
    """s(tau, M) * n_i / N, with N the examples of all M known devices.

    A device reports n_i with its updates. A device without an update counts with the mean of the
    others.
    """

    kept = ("_examples", "_total")

    def __init__(self, decay: Callable[[int, int], float] | None = None) -> None:
        self.decay = decay
        self._examples: dict[int, int] = {}
        self._total = 0

    def __call__(self, contribution: Contribution, view: ServerView) -> float:
        device, count = contribution.task.device, contribution.update.num_examples
        self._total += count - self._examples.get(device, 0)
        self._examples[device] = count
        known = len(self._examples)
        devices = max(known, len(view.idle) + len(view.working))  # known ones may be absent
        share = count / (self._total * devices / known)
        return share if self.decay is None else share * self.decay(contribution.staleness, devices)

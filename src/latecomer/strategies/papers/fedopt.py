"""Reddi et al., Adaptive Federated Optimization, 2021 (Algorithm 2: FedAdagrad, FedYogi, FedAdam),
and Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM).

Synchronous rounds; the mean delta of a round is a pseudo-gradient for an optimiser on the server:
m <- beta1 m + (1 - beta1) delta, v as FedAdagrad, FedYogi or FedAdam define it,
w <- w + server_lr * m / (sqrt(v) + tau). Unlike Adam, Algorithm 2 has no bias correction. FedAvgM
is w <- w + server_lr * u with u <- beta u + delta.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, NamedTuple, cast

import torch
from annotated_types import Interval
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful, Strategy
from latecomer.strategies.options import Positive
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.parts.merging import Epochs, buffers_from, moved, trained_by
from latecomer.strategies.recipe import recipe

Moments = tuple[Tensor, ...]
Retention = Annotated[float, Interval(ge=0, lt=1)]  # share of a moment kept at every step
PAPER = "Reddi et al. 2021"


class Optimiser(NamedTuple):
    """An optimiser as pure functions: initial moments, and moments and direction after a step."""

    start: Callable[[Tensor], Moments]
    step: Callable[[Moments, Tensor], tuple[Moments, Tensor]]  # -> moments, direction


class ServerOptimiser(Stateful):
    """Combine: head + step * factor * direction, with moments for each lineage.

    The pseudo-gradient is the sum of the weighted deltas over the sum of the weights (`mean`) or
    over their number. `factor` is computed from the contributions. A coordinate that none of them
    covers keeps its value and its moments. A new lineage starts with its parent's moments; those of
    an absorbed lineage are dropped. Buffers of the network (BatchNorm) are averaged instead.
    """

    kept = ("_moments", "_trained")

    def __init__(
        self,
        optimiser: Optimiser,
        mean: bool,
        factor: Callable[[Sequence[Contribution]], float] = lambda contributions: 1.0,
    ) -> None:
        self.optimiser, self.mean, self.factor = optimiser, mean, factor
        self._moments: dict[str, Moments] = {}
        self._trained: int | None = None  # values of the model that are parameters; None: all

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        self._trained = buffers_from(view)

    def __call__(
        self, lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        delta = moved(torch.zeros_like(head), contributions, self.mean, step=1.0)
        old = self._moments.get(lineage) or self.optimiser.start(head)
        new, direction = self.optimiser.step(old, delta)
        result = torch.add(head, direction, alpha=step * self.factor(contributions))
        covered = trained_by(contributions, head)
        if covered is not None:
            new = tuple(torch.where(covered, n, o) for n, o in zip(new, old, strict=True))
            result = torch.where(covered, result, head)
        if self._trained is not None:
            average = moved(head, contributions, mean=True, step=1.0)
            result[self._trained :] = average[self._trained :]
        self._moments[lineage] = new
        return result

    def on_fork(self, parent: str, child: str) -> None:
        if parent in self._moments:
            self._moments[child] = self._moments[parent]  # never modified in place

    def on_absorb(self, into: str, gone: str) -> None:
        self._moments.pop(gone, None)


def momentum(beta: float) -> Optimiser:
    """u <- beta u + delta; the direction is u. FedAvgM."""

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        velocity = torch.add(delta, moments[0], alpha=beta)
        return (velocity,), velocity

    return Optimiser(lambda head: (torch.zeros_like(head),), step)


def adaptive(beta1: float, tau: float, second: Callable[[Tensor, Tensor], Tensor]) -> Optimiser:
    """The direction m / (sqrt(v) + tau), v <- second(v, delta^2). Algorithm 2."""

    def start(head: Tensor) -> Moments:
        return torch.zeros_like(head), torch.full_like(head, tau**2)  # v_-1 >= tau^2

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        m = beta1 * moments[0] + (1 - beta1) * delta
        v = second(moments[1], delta * delta)
        return (m, v), m / (v.sqrt() + tau)

    return Optimiser(start, step)


def adagrad(beta1: float, tau: float) -> Optimiser:
    """v <- v + delta^2."""
    return adaptive(beta1, tau, lambda v, square: v + square)


def yogi(beta1: float, beta2: float, tau: float) -> Optimiser:
    """v <- v - (1 - beta2) delta^2 sign(v - delta^2)."""
    return adaptive(beta1, tau, lambda v, square: v - (1 - beta2) * square * (v - square).sign())


def adam(beta1: float, beta2: float, tau: float) -> Optimiser:
    """v <- beta2 v + (1 - beta2) delta^2."""
    return adaptive(beta1, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


def rounds(plain: Strategy, name: str, optimiser: Optimiser) -> Strategy:
    """`fedavg` with an optimiser on the server."""
    cast(Epochs, plain.merge).combine = ServerOptimiser(optimiser, mean=True)
    return replace(plain, name=name)


@recipe("fedavgm", "synchronous rounds, momentum on the server", "Hsu et al. 2019", of=(fedavg,))
def fedavgm(plain: Strategy, beta: Retention = 0.9) -> Strategy:
    """Options, beside those of `fedavg`; `server_lr` is the factor on the velocity:

    beta: share of the velocity kept in every round; constant deltas move the model by
        server_lr / (1 - beta) times their size, so lower `server_lr` with a larger `beta`.
    """
    return rounds(plain, "fedavgm", momentum(beta))


# `server_lr` is the step of the optimiser, the first option to tune.
SMALL_STEPS = (partial(fedavg, server_lr=0.1),)


@recipe("fedadagrad", "synchronous rounds, Adagrad on the server", PAPER, of=SMALL_STEPS)
def fedadagrad(plain: Strategy, beta1: Retention = 0.0, tau: Positive = 1e-3) -> Strategy:
    """Options, beside those of `fedavg`:

    beta1: share of the first moment kept in every round.
    tau: added to the root of the second moment; larger values make the steps less adaptive.
    """
    return rounds(plain, "fedadagrad", adagrad(beta1, tau))


@recipe("fedyogi", "synchronous rounds, Yogi on the server", PAPER, of=SMALL_STEPS)
def fedyogi(
    plain: Strategy, beta1: Retention = 0.9, beta2: Retention = 0.99, tau: Positive = 1e-3
) -> Strategy:
    """Options, beside those of `fedavg`:

    beta2: share of the second moment kept in every round.
    beta1, tau: as in `fedadagrad`.
    """
    return rounds(plain, "fedyogi", yogi(beta1, beta2, tau))


@recipe("fedadam", "synchronous rounds, Adam on the server", PAPER, of=SMALL_STEPS)
def fedadam(
    plain: Strategy, beta1: Retention = 0.9, beta2: Retention = 0.99, tau: Positive = 1e-3
) -> Strategy:
    """Options, beside those of `fedavg`:

    beta1, beta2, tau: as in `fedyogi`.
    """
    return rounds(plain, "fedadam", adam(beta1, beta2, tau))

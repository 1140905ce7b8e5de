"""Reddi et al., Adaptive Federated Optimization, 2021 (Algorithm 2: FedAdagrad, FedYogi, FedAdam),
and Hsu et al., Measuring the Effects of Non-Identical Data Distribution, 2019 (FedAvgM).

A synchronous round; the mean of its deltas is a pseudo-gradient, along which an optimiser on the
server takes its step. Unlike Adam on one machine, Algorithm 2 corrects no bias.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, NotNegative, Positive, Share
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.parts.merging import Epochs, moved, trained_by
from latecomer.strategies.parts.selecting import SelectName
from latecomer.strategies.recipe import recipe

Moments = tuple[Tensor, ...]
Memory = Annotated[float, Interval(ge=0, lt=1)]  # what is left of a moment after a step
PAPER = "Reddi et al. 2021"


class Rule(NamedTuple):
    """An optimiser as pure functions: how its moments begin, and one step from them."""

    start: Callable[[Tensor], Moments]
    step: Callable[[Moments, Tensor], tuple[Moments, Tensor]]  # -> moments, direction


class ServerOptimiser:
    """Combine: head + step * pace * direction, by a rule that keeps moments for each lineage.

    `mean` divides by the sum of the weights, otherwise by the number of contributions. A
    coordinate that nobody of them trained keeps its value and its moments. A fork goes on with its
    parent's moments; those of an absorbed lineage are dropped.
    """

    def __init__(
        self,
        rule: Rule,
        mean: bool,
        pace: Callable[[Sequence[Contribution]], float] = lambda contributions: 1.0,
    ) -> None:
        self.rule, self.mean, self.pace = rule, mean, pace
        self._moments: dict[str, Moments] = {}

    def __call__(
        self, lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        delta = moved(torch.zeros_like(head), contributions, self.mean, step=1.0)
        old = self._moments.get(lineage) or self.rule.start(head)
        new, direction = self.rule.step(old, delta)
        result = torch.add(head, direction, alpha=step * self.pace(contributions))
        covered = trained_by(contributions, head)
        if covered is not None:
            new = tuple(torch.where(covered, n, o) for n, o in zip(new, old, strict=True))
            result = torch.where(covered, result, head)
        self._moments[lineage] = new
        return result

    def on_fork(self, parent: str, child: str) -> None:
        if parent in self._moments:
            self._moments[child] = self._moments[parent]  # never written into, so never copied

    def on_absorb(self, into: str, gone: str) -> None:
        self._moments.pop(gone, None)

    def state(self) -> dict[str, Any]:
        return {"moments": dict(self._moments)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._moments = dict(state["moments"])


def momentum(beta: float) -> Rule:
    """v <- beta v + delta; the direction is v. FedAvgM."""

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        velocity = torch.add(delta, moments[0], alpha=beta)
        return (velocity,), velocity

    return Rule(lambda head: (torch.zeros_like(head),), step)


def adaptive(beta1: float, tau: float, second: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """m / (sqrt(v) + tau), with `second` for how v follows the squared delta. Algorithm 2."""

    def start(head: Tensor) -> Moments:
        return torch.zeros_like(head), torch.full_like(head, tau**2)  # v_-1 >= tau^2

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        m = beta1 * moments[0] + (1 - beta1) * delta
        v = second(moments[1], delta * delta)
        return (m, v), m / (v.sqrt() + tau)

    return Rule(start, step)


def adagrad(beta1: float, tau: float) -> Rule:
    """v <- v + delta^2."""
    return adaptive(beta1, tau, lambda v, square: v + square)


def yogi(beta1: float, beta2: float, tau: float) -> Rule:
    """v <- v - (1 - beta2) delta^2 sign(v - delta^2)."""
    return adaptive(beta1, tau, lambda v, square: v - (1 - beta2) * square * (v - square).sign())


def adam(beta1: float, beta2: float, tau: float) -> Rule:
    """v <- beta2 v + (1 - beta2) delta^2."""
    return adaptive(beta1, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


def rounds(
    name: str,
    rule: Rule,
    server_lr: float,
    fraction: float,
    timeout: float,
    min_devices: int,
    select: SelectName,
) -> Strategy:
    """FedAvg with an optimiser on the server."""
    plain = fedavg(fraction, timeout, min_devices, select=select)
    merge = Epochs(keep_late=False, step=server_lr, combine=ServerOptimiser(rule, mean=True))
    return replace(plain, name=name, merge=merge)


@recipe("fedavgm", "synchronous rounds, momentum on the server", "Hsu et al. 2019")
def fedavgm(
    beta: Memory = 0.9,
    server_lr: Positive = 1.0,
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    select: SelectName = "random",
) -> Strategy:
    """Steady deltas move the model by server_lr / (1 - beta) times their size."""
    return rounds("fedavgm", momentum(beta), server_lr, fraction, timeout, min_devices, select)


@recipe("fedadagrad", "synchronous rounds, Adagrad on the server", PAPER)
def fedadagrad(
    server_lr: Positive = 0.1,
    beta1: Memory = 0.0,
    tau: Positive = 1e-3,
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    select: SelectName = "random",
) -> Strategy:
    rule = adagrad(beta1, tau)
    return rounds("fedadagrad", rule, server_lr, fraction, timeout, min_devices, select)


@recipe("fedyogi", "synchronous rounds, Yogi on the server", PAPER)
def fedyogi(
    server_lr: Positive = 0.1,
    beta1: Memory = 0.9,
    beta2: Memory = 0.99,
    tau: Positive = 1e-3,
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    select: SelectName = "random",
) -> Strategy:
    rule = yogi(beta1, beta2, tau)
    return rounds("fedyogi", rule, server_lr, fraction, timeout, min_devices, select)


@recipe("fedadam", "synchronous rounds, Adam on the server", PAPER)
def fedadam(
    server_lr: Positive = 0.1,
    beta1: Memory = 0.9,
    beta2: Memory = 0.99,
    tau: Positive = 1e-3,
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    select: SelectName = "random",
) -> Strategy:
    """`tau` says how little a coordinate may have moved before it is no longer magnified."""
    rule = adam(beta1, beta2, tau)
    return rounds("fedadam", rule, server_lr, fraction, timeout, min_devices, select)

"""Wang et al., FADAS: Towards Federated Adaptive Asynchronous Optimization, 2024 (Algorithm 1).

Every M updates make a pseudo-gradient, along which AMSGrad takes its step. If the stalest of them
is more than tau_c commits late, the step is divided by its staleness, as in the authors' code.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import Count, CountOrOff, Positive
from latecomer.strategies.papers.fedopt import Memory, Moments, Rule, ServerOptimiser
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.recipe import recipe


def amsgrad(beta1: float, beta2: float, eps: float) -> Rule:
    """m / (sqrt(v_max) + eps), where v_max is the largest second moment so far."""

    def start(head: Tensor) -> Moments:
        return torch.zeros_like(head), torch.zeros_like(head), torch.zeros_like(head)

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        m = beta1 * moments[0] + (1 - beta1) * delta
        v = beta2 * moments[1] + (1 - beta2) * delta * delta
        v_max = torch.maximum(moments[2], v)
        return (m, v, v_max), m / (v_max.sqrt() + eps)

    return Rule(start, step)


def slower_when_late(tau_c: int) -> Callable[[Sequence[Contribution]], float]:
    """1, or 1 / tau_max if the stalest of the buffer is more than `tau_c` commits late."""

    def pace(contributions: Sequence[Contribution]) -> float:
        stalest = max(c.staleness for c in contributions)
        return 1.0 if stalest <= tau_c else 1.0 / stalest

    return pace


@recipe("fadas", "gather M updates, AMSGrad on the server, slower when late", "Wang et al. 2024")
def fadas(
    size: Count = 5,
    server_lr: Positive = 0.01,
    beta1: Memory = 0.9,
    beta2: Memory = 0.99,
    eps: Positive = 1e-8,
    tau_c: CountOrOff = 1,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """A `tau_c` beyond all staleness is FADAS without the delay-adaptive step."""
    optimiser = ServerOptimiser(amsgrad(beta1, beta2, eps), False, slower_when_late(tau_c))
    return Strategy(
        name="fadas",
        merge=Buffer(size, server_lr, optimiser),
        dispatch=ImmediateDispatch(concurrency),
    )

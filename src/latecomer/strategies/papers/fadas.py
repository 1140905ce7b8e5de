"""Wang et al., FADAS: Towards Federated Adaptive Asynchronous Optimization, 2024 (Algorithm 1).

The mean of every M deltas is a pseudo-gradient Delta for AMSGrad on the server:
m <- beta1 m + (1 - beta1) Delta, v <- beta2 v + (1 - beta2) Delta^2, v_max <- max(v_max, v),
w <- w + eta m / (sqrt(v_max) + eps). If the largest staleness tau_max of the M updates exceeds
tau_c, eta is divided by tau_max, as in the authors' code.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import Count, CountOrOff, Positive
from latecomer.strategies.papers.fedopt import Moments, Optimiser, Retention, ServerOptimiser
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.recipe import recipe


def amsgrad(beta1: float, beta2: float, eps: float) -> Optimiser:
    """The direction m / (sqrt(v_max) + eps), with v_max the largest second moment so far."""

    def start(head: Tensor) -> Moments:
        return torch.zeros_like(head), torch.zeros_like(head), torch.zeros_like(head)

    def step(moments: Moments, delta: Tensor) -> tuple[Moments, Tensor]:
        m = beta1 * moments[0] + (1 - beta1) * delta
        v = beta2 * moments[1] + (1 - beta2) * delta * delta
        v_max = torch.maximum(moments[2], v)
        return (m, v, v_max), m / (v_max.sqrt() + eps)

    return Optimiser(start, step)


def delay_adaptive(tau_c: int) -> Callable[[Sequence[Contribution]], float]:
    """The factor on the step: 1, or 1 / tau_max if tau_max > `tau_c`, in commits."""

    def factor(contributions: Sequence[Contribution]) -> float:
        tau_max = max(c.staleness for c in contributions)
        return 1.0 if tau_max <= tau_c else 1.0 / tau_max

    return factor


@recipe(
    "fadas",
    "buffer of M updates, AMSGrad on the server with a step reduced by staleness",
    "Wang et al. 2024",
)
def fadas(
    size: Count = 5,
    server_lr: Positive = 0.01,
    beta1: Retention = 0.9,
    beta2: Retention = 0.99,
    eps: Positive = 1e-8,
    tau_c: CountOrOff = 1,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    size: M, updates per commit.
    server_lr: eta, the step of the server's optimiser; the first option to tune.
    beta1: share of the first moment that is kept at every commit.
    beta2: share of the second moment that is kept at every commit.
    eps: added to the root of the second moment.
    tau_c: staleness in commits beyond which the step is divided by the largest staleness; a very
        large value switches this off.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    optimiser = ServerOptimiser(amsgrad(beta1, beta2, eps), False, delay_adaptive(tau_c))
    return Strategy(
        name="fadas",
        merge=Buffer(size, server_lr, optimiser),
        dispatch=ImmediateDispatch(concurrency),
    )

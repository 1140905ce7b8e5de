"""Gradient inversion as printed in the FedDC paper, as a baseline for ours.

"We randomly initialize each data sample and label in D_est, and then iteratively update D_est by
minimizing Dist[LocalUpdate(w; D_est), w_i] using gradient descent" (section 3.1), Dist being the
L1 norm of the whole difference or, with `mask`, of its largest coordinates (section 5.1). Labels
are soft and learned; Adam at 0.1 as in the authors' code. No label is estimated from the output
layer, and no example has a weight.

To its advantage it works on all devices in one batch as ours does (10% cheaper on LeNet than one
by one, several times on an MLP), and keeps the best examples rather than the last.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.device.flat import FlatModel
from latecomer.device.training import Plan, local_update
from latecomer.strategies.parts.inversion import (
    Effort,
    Estimate,
    InversionTarget,
    local_steps,
    top_mask,
)

RATE = 0.1
WINDOW, GAIN = (
    100,
    0.001,
)  # converged: the loss fell by less than the share GAIN in WINDOW iterations


class Point(NamedTuple):
    """The estimates after a number of iterations and CPU seconds per device."""

    iterations: int
    cpu: float
    converged: bool  # here or before
    estimates: list[Estimate]


def literal_inversion(
    network: FlatModel,
    targets: Sequence[InversionTarget],
    effort: Effort,
    stops: Collection[int],
) -> Iterator[Point]:
    """The estimates at every iteration in `stops`, at convergence, and at the last iteration.

    It continues after convergence until the consumer stops it. Of `effort`, the number of examples,
    the number of iterations and `mask` are used. All devices must run the same program on as many
    examples.
    """
    spec, count = targets[0].spec, targets[0].num_examples
    steps, size = local_steps(spec, count), effort.size(count)
    base, delta = (
        torch.stack(rows) for rows in zip(*((t.base, t.delta) for t in targets), strict=True)
    )
    mask = top_mask(delta, effort.mask)
    rngs = [torch.Generator().manual_seed(t.seed) for t in targets]
    x = torch.stack([torch.randn(size, *network.input_shape, generator=rng) for rng in rngs])
    labels = torch.stack([torch.randn(size, network.num_classes, generator=rng) for rng in rngs])
    free = [x.requires_grad_(), labels.requires_grad_()]
    adam = torch.optim.Adam(free, RATE)
    plan = Plan(torch.arange(size).expand(steps, size), torch.ones(steps, size))

    def train(base: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        y = F.softmax(labels, 1)
        return local_update(network, base, x, y, spec, plan, functional=True) - base

    batched = torch.func.vmap(train)
    best_loss = torch.full((len(targets),), torch.inf)
    best = [values.detach().clone() for values in free]
    losses: list[Tensor] = []
    converged = False
    cpu, start = 0.0, time.process_time()
    for iteration in range(effort.iterations + 1):
        difference = batched(base, x, labels) - delta
        loss = (difference if mask is None else difference * mask).abs().sum(1)
        better = loss.detach() < best_loss
        best_loss = torch.where(better, loss.detach(), best_loss)
        for kept, values in zip(best, free, strict=True):
            kept[better] = values.detach()[better]
        losses.append(best_loss)
        ends = iteration == effort.iterations
        settles = not converged and _has_converged(losses)
        converged = converged or settles
        if ends or settles or iteration in stops:
            cpu += time.process_time() - start
            weights = torch.zeros(size)
            estimates = [
                Estimate(best[0][i].clone(), best[1][i].clone(), weights, spec, steps)
                for i in range(len(targets))
            ]
            yield Point(iteration, cpu / len(targets), converged, estimates)
            start = time.process_time()
        if ends:
            return
        adam.zero_grad()
        torch.autograd.backward(loss.sum(), inputs=free)
        adam.step()


def _has_converged(losses: Sequence[Tensor]) -> bool:
    if len(losses) <= WINDOW:
        return False
    return bool((losses[-1] > losses[-1 - WINDOW] * (1 - GAIN)).all())

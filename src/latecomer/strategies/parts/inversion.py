"""Gradient inversion: synthetic examples whose local training reproduces an update.

Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025
(FedDC, sections 3 to 5), and its sequel (Intertwined). The server optimises examples D_est so that
the device's local training program on D_est, started from the model w_old the device was sent,
gives its delta (Eq. 6):

    min over D_est of ||M (LocalUpdate(w_old; D_est) - w_old - delta)||_1 / ||M delta||_1

with M a mask of the largest coordinates. LocalUpdate(w_now; D_est) - w_now then estimates the delta
that the device would send for the present model w_now (Eq. 5).

Differences from the papers, faster and more accurate (docs/studies/feddc.md): labels are estimated
from the output bias and stay fixed, each example has a learned weight instead, and all late devices
with the same program are inverted in one batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from latecomer.core.codec import portable
from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.training import Plan, local_update, reason_not_to_batch
from latecomer.loading import first_line
from latecomer.strategies.parts.labels import allocate_labels, label_shares

BETAS = (0.8, 0.95)  # of Adam
EXAMPLE_RATE, WEIGHT_RATE = 0.3, 0.1  # learning rates of examples (and soft labels) and weights
WARM_RATE = 0.2  # factor on the rates after a warm start, which full rates would leave
MAX_DEAD_ITERATIONS = 10  # a start without any gain after these is given up
MAX_STARTS = 3
RESTART_GROWTH = 3.0  # factor on the scale of the initial examples at each new start
PLATEAU_ITERATIONS = 10  # the fit must improve by MIN_GAIN within these
MIN_GAIN = 0.005
MAX_BATCH_DEVICES = 16
MAX_BATCH_FLOATS = 2**28  # memory of a batch: 1 GB
MAX_SAMPLES = 256  # bound for a share of the number of examples that a device reports


@dataclass(frozen=True, slots=True)
class Effort:
    """The settings of an inversion; `docs/studies/feddc.md` has the measured trade-offs.

    samples: number of examples in D_est.
    share: if > 0, D_est has this share of the device's number of examples instead.
    iterations: optimiser steps of a cold start.
    warm_iterations: optimiser steps from the device's last D_est.
    mask: share of the coordinates, the largest, on which the update must be reproduced.
    steps: largest number of training steps that are unrolled.
    scale: standard deviation of the initial random examples.
    """

    samples: int = 32
    share: float = 0.0
    iterations: int = 40
    warm_iterations: int = 8
    mask: float = 1.0
    steps: int = 50
    scale: float = 1.0

    def size(self, num_examples: int) -> int:
        """The size of D_est for a device that reports `num_examples`."""
        if not self.share:
            return self.samples
        return min(MAX_SAMPLES, max(1, math.ceil(self.share * num_examples)))


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """D_est: examples whose training reproduces an update of a device. They stay on the server.

    `labels` are classes, or logits of learned soft labels. `fit` is the relative L1 error of the
    reproduced update. `spec` and `steps` are the program (`inversion_program`).
    """

    x: Tensor
    labels: Tensor
    weights: Tensor  # logits; their softmax is the weight of each example
    spec: TrainSpec
    steps: int
    fit: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class InversionTarget:
    """An update to invert: `delta` is what training from `base` gave; `start` is a warm start."""

    base: Tensor
    delta: Tensor
    spec: TrainSpec
    num_examples: int
    seed: int
    start: Estimate | None = None


def local_steps(spec: TrainSpec, num_examples: int) -> int:
    """The number of optimiser steps of the device's program on `num_examples` examples."""
    return spec.local_epochs * spec.epoch_steps(num_examples)


def effective_rate(spec: TrainSpec, steps: int) -> float:
    """The learning rate times the sum of the weights with which all gradients are added.

    With momentum m, the gradient of the j-th last step is added 1 + m + ... + m^(j-1) times.
    """
    momentum = spec.momentum if spec.optimizer == "sgd" else 0.0
    repeats = (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
    return spec.lr * spec.lr_scale * repeats


def inversion_program(spec: TrainSpec, num_examples: int, max_steps: int) -> tuple[TrainSpec, int]:
    """The device's program for D_est: full-batch steps, as many as the device took or `max_steps`.

    With fewer steps the learning rate is raised so that the effective one stays the same. Feedback
    is no part of the program.
    """
    spec = replace(spec, feedback=False) if spec.feedback else spec
    taken = local_steps(spec, num_examples)
    steps = min(taken, max_steps)
    if steps == taken:
        return spec, steps
    ratio = effective_rate(spec, taken) / effective_rate(spec, steps)
    return replace(spec, lr_scale=spec.lr_scale * ratio), steps


def replay(network: FlatModel, params: Tensor, estimate: Estimate) -> Tensor:
    """The delta that training `params` on the estimate gives."""
    with torch.no_grad():
        # Without derivatives and vmap a run takes less than half the time.
        e = estimate
        parts = (params, e.x, e.labels, e.weights)
        return _train(network, e.spec, e.steps, *parts, functional=False)


def replay_each(
    network: FlatModel, params: Sequence[Tensor], estimates: Sequence[Estimate]
) -> list[Tensor]:
    """`replay` of several, those with the same program in batches."""
    deltas: list[Tensor] = [torch.empty(0)] * len(estimates)
    kinds = [(e.spec, e.steps, e.x.shape, e.labels.dtype) for e in estimates]
    for same in grouped(kinds):
        for begin in range(0, len(same), MAX_BATCH_DEVICES):
            places = same[begin : begin + MAX_BATCH_DEVICES]
            group, bases = [estimates[i] for i in places], [params[i] for i in places]
            if len(group) == 1:
                deltas[places[0]] = replay(network, bases[0], group[0])
                continue
            run = _program(network, group[0].spec, group[0].steps)
            with torch.no_grad():
                found = run(torch.stack(bases), *(torch.stack(part) for part in _parts(group)))
            for i, delta in zip(places, found, strict=True):
                deltas[i] = delta.clone()
    return deltas


def misfit(estimate: Tensor, delta: Tensor) -> float:
    """||estimate - delta||_1 / ||delta||_1: 0 is exact, 1 is the error of an estimate of 0."""
    size = delta.abs().sum().item()
    return (estimate - delta).abs().sum().item() / size if size else math.inf


def reason_not_to_invert(network: FlatModel) -> str | None:
    """Why the training of this network cannot be differentiated; None if it can."""
    if (reason := _reason_not_to_estimate(network)) is not None:
        return reason
    if network not in _REASONS:
        x = torch.zeros(1, *network.input_shape, requires_grad=True)
        parts = (network.init(0), x, network.objective.placeholder(1), torch.zeros(1))
        try:
            with sdpa_kernel(SDPBackend.MATH):
                delta = _train(network, TrainSpec(), 1, *parts)
                torch.autograd.grad(delta.sum(), x, allow_unused=True)
            _REASONS[network] = None
        except Exception as error:  # a user's network may raise anything
            _REASONS[network] = f"its training cannot be differentiated: {first_line(error)}"
    return _REASONS[network]


def _reason_not_to_estimate(network: FlatModel) -> str | None:
    """Why examples cannot be estimated from an update, as far as layers and objective tell."""
    objective = network.objective
    if reason := network.opaque or network.traits.reason_not_pure:
        return reason
    if not network.input_dtype.is_floating_point:
        return "its inputs are integers"
    if objective.function is not None:
        return "updates of a loss of your own cannot be inverted"
    # With numbers as targets the loss has no bound: training on the estimate can diverge.
    invertible = objective.kind in ("classes", "multi-label")
    return None if invertible else f"targets of {objective.kind} cannot be estimated"


def soft_labels(network: FlatModel, logits: Tensor) -> Tensor:
    """Probabilities from learned logits: of one class per example, or of each label."""
    return F.softmax(logits, 1) if network.objective.classifies else logits.sigmoid()


def _batch_limit(network: FlatModel, size: int, steps: int) -> int:
    """Devices per batch by memory: a differentiated step keeps three times its activations."""
    if network not in _ACTIVATIONS:
        sizes: list[int] = []
        handles = [
            part.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel()))
            for part in network.module.modules()
            if not list(part.children())
        ]
        with torch.no_grad():
            network.logits(network.init(0), network.example(1))
        for handle in handles:
            handle.remove()
        _ACTIVATIONS[network] = sum(sizes)
    floats = steps * (3 * _ACTIVATIONS[network] * size + 8 * network.layout.size)
    return max(1, min(MAX_BATCH_DEVICES, MAX_BATCH_FLOATS // floats))


def invert(
    network: FlatModel, targets: Sequence[InversionTarget], effort: Effort
) -> list[Estimate]:
    """D_est for every target; targets with the same program are inverted in one batch."""
    found: list[Estimate | None] = [None] * len(targets)
    signatures = [
        (
            *inversion_program(t.spec, t.num_examples, effort.steps),
            effort.size(t.num_examples),
            None if t.start is None else t.start.labels.dtype,
        )
        for t in targets
    ]
    for places in grouped(signatures):
        _, steps, size, _ = signatures[places[0]]
        batch = _batch_limit(network, size, steps)
        for begin in range(0, len(places), batch):
            some = places[begin : begin + batch]
            for i, estimate in zip(
                some, _invert_batch(network, [targets[i] for i in some], effort), strict=True
            ):
                found[i] = estimate
    return [estimate for estimate in found if estimate is not None]


def _invert_batch(
    network: FlatModel, targets: Sequence[InversionTarget], effort: Effort
) -> list[Estimate]:
    """All from a warm start or all from a cold one; those without a gain are started again."""
    best = [t.start for t in targets if t.start is not None]
    if best:
        best = _optimise(network, targets, best, effort, effort.warm_iterations, WARM_RATE)
    else:
        best = _cold_start(network, targets, effort, 0)
    for attempt in range(1, MAX_STARTS):
        dead = [i for i, estimate in enumerate(best) if estimate.fit >= 1.0 - MIN_GAIN]
        if not dead:
            break
        tried = _cold_start(network, [targets[i] for i in dead], effort, attempt)
        for i, estimate in zip(dead, tried, strict=True):
            if estimate.fit < best[i].fit:
                best[i] = estimate
    return best


def _cold_start(
    network: FlatModel, targets: Sequence[InversionTarget], effort: Effort, attempt: int
) -> list[Estimate]:
    """Invert from random examples; targets with known and with learned labels in two batches."""
    found = _initial_estimates(network, targets, effort, attempt)
    for places in grouped([estimate.labels.dtype for estimate in found]):
        some, starts = [targets[i] for i in places], [found[i] for i in places]
        done = _optimise(network, some, starts, effort, effort.iterations, 1.0)
        for i, estimate in zip(places, done, strict=True):
            found[i] = estimate
    return found


def _initial_estimates(
    network: FlatModel, targets: Sequence[InversionTarget], effort: Effort, attempt: int
) -> list[Estimate]:
    """Random examples with labels from the output bias, or with soft labels to be learned."""
    estimates = []
    for t in targets:
        spec, steps = inversion_program(t.spec, t.num_examples, effort.steps)
        size = effort.size(t.num_examples)
        rng = torch.Generator().manual_seed(t.seed + attempt)
        scale = effort.scale * RESTART_GROWTH**attempt
        x = scale * torch.randn(size, *network.input_shape, generator=rng)
        shares = label_shares(network, t.base, t.delta, x, effective_rate(spec, steps))
        if shares is None:
            objective = network.objective
            shape = (network.num_classes,) if objective.classifies else objective.target_shape
            labels = torch.randn(size, *shape, generator=rng)
            weights = torch.zeros(size)
        else:
            labels, weights = allocate_labels(shares, size)
        estimates.append(Estimate(x, labels, weights, spec, steps))
    return estimates


def _optimise(
    network: FlatModel,
    targets: Sequence[InversionTarget],
    starts: Sequence[Estimate],
    effort: Effort,
    iterations: int,
    rate: float,
) -> list[Estimate]:
    """Adam on the masked relative L1 error (Eq. 6); returns the best examples of all iterations."""
    base, delta = (
        torch.stack(rows) for rows in zip(*((t.base, t.delta) for t in targets), strict=True)
    )
    mask = top_mask(delta, effort.mask)
    target = delta if mask is None else delta * mask
    scale = target.abs().sum(1).clamp_min(torch.finfo(delta.dtype).tiny)
    run = _program(network, starts[0].spec, starts[0].steps)
    x, labels, weights = (torch.stack(parts) for parts in _parts(starts))
    free = [x, weights] if labels.dtype == torch.int64 else [x, weights, labels]
    rates = [EXAMPLE_RATE, WEIGHT_RATE, EXAMPLE_RATE]
    adam = [_Adam(values, rate * full) for values, full in zip(free, rates, strict=False)]
    best_fit = torch.full((len(targets),), math.inf)
    best = [values.clone() for values in free]
    fits: list[Tensor] = []
    for iteration in range(iterations + 1):
        last = iteration == iterations
        for values in free:
            values.requires_grad_(not last)
        with torch.set_grad_enabled(not last), sdpa_kernel(SDPBackend.MATH):
            difference = run(base, x, labels, weights) - delta
            if mask is not None:
                difference = difference * mask
            fit = difference.abs().sum(1) / scale
        present = fit.detach()
        better = present < best_fit
        best_fit = torch.where(better, present, best_fit)
        for kept, values in zip(best, free, strict=True):
            kept[better] = values.detach()[better]
        fits.append(best_fit)
        if last or _has_settled(fits, iterations, rate < 1.0):
            break
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(fit.sum(), free)
        decay = 0.5 * (1.0 + math.cos(math.pi * iteration / iterations))
        for one, values, gradient in zip(adam, free, gradients, strict=True):
            one.step(values, gradient, decay)
    if len(best) == 3:
        labels = best[2]
    return [
        Estimate(best[0][i].clone(), labels[i].clone(), best[1][i].clone(), s.spec, s.steps, fit)
        for i, (s, fit) in enumerate(zip(starts, best_fit.tolist(), strict=True))
    ]


def _has_settled(fits: Sequence[Tensor], iterations: int, warm: bool) -> bool:
    """Whether no fit of the batch improves any more, or after a cold start none ever has."""
    done = len(fits) - 1
    if not warm and done == MAX_DEAD_ITERATIONS and bool((fits[-1] >= 1.0 - MIN_GAIN).all()):
        return True
    if done < max(PLATEAU_ITERATIONS, iterations // 2):
        return False
    return not bool((fits[-1] < fits[-1 - PLATEAU_ITERATIONS] * (1.0 - MIN_GAIN)).any())


def top_mask(delta: Tensor, share: float) -> Tensor | None:
    """1 at the `share` largest coordinates of each row, 0 elsewhere; None if `share` is 1."""
    if share >= 1.0:
        return None
    count = max(1, math.ceil(share * delta.shape[1]))
    places = delta.abs().topk(count, dim=1).indices
    return torch.zeros_like(delta).scatter_(1, places, 1.0)


class _Adam:
    """Adam for one variable, each row (device) by itself. Kingma and Ba, 2015."""

    def __init__(self, values: Tensor, rate: float) -> None:
        self.rate = rate
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)
        self.steps = 0

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, decay: float) -> None:
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        first = self.first / (1 - BETAS[0] ** self.steps)
        second = self.second / (1 - BETAS[1] ** self.steps)
        values.addcdiv_(first, second.sqrt_().add_(1e-12), value=-self.rate * decay)


Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Computed once per network.
_UNBATCHED: "WeakKeyDictionary[FlatModel, bool]" = WeakKeyDictionary()
_REASONS: "WeakKeyDictionary[FlatModel, str | None]" = WeakKeyDictionary()
_ACTIVATIONS: "WeakKeyDictionary[FlatModel, int]" = WeakKeyDictionary()


def _train(
    network: FlatModel,
    spec: TrainSpec,
    steps: int,
    base: Tensor,
    x: Tensor,
    labels: Tensor,
    weights: Tensor,
    functional: bool = True,
) -> Tensor:
    """The program of one device: full-batch steps on weighted examples from `base`; the delta."""
    size = len(x)
    counts = (size * F.softmax(weights, 0)).expand(steps, size)
    plan = Plan(torch.arange(size).expand(steps, size), counts)
    y = labels if labels.dtype == torch.int64 else soft_labels(network, labels)
    trained = local_update(
        network, base, x, y, spec, plan, functional=functional, weighted=not functional
    )
    return trained - base


def _program(network: FlatModel, spec: TrainSpec, steps: int) -> Program:
    """The program for stacked devices: (base, x, labels, weights) -> delta."""
    train = partial(_train, network, spec, steps)

    def one_by_one(base: Tensor, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return torch.stack([train(*each) for each in zip(base, x, labels, weights, strict=True)])

    if network not in _UNBATCHED:
        _UNBATCHED[network] = reason_not_to_batch(network) is not None
    batched: Program = torch.func.vmap(train)
    return lambda *parts: (
        one_by_one(*parts) if len(parts[0]) == 1 or _UNBATCHED[network] else batched(*parts)
    )


def _parts(estimates: Sequence[Estimate]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return (
        [e.x for e in estimates],
        [e.labels for e in estimates],
        [e.weights for e in estimates],
    )


def grouped(signatures: Sequence[object]) -> list[list[int]]:
    """The indices of equal signatures, in order of first appearance."""
    places: dict[object, list[int]] = {}
    for i, signature in enumerate(signatures):
        places.setdefault(signature, []).append(i)
    return list(places.values())

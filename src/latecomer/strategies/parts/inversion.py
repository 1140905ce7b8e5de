"""Gradient inversion: a few invented examples that explain an update.

Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025
(FedDC, sections 3 to 5), and its sequel on intertwined heterogeneities and unlimited staleness.
The server looks for examples D_est with which the device's own training program, run from the
model the device was sent, gives the update that came back. Run from today's model, they then tell
what the device would send today.

What we do otherwise than the papers, because it is faster and closer (docs/studies/feddc.md):
labels are read off the output layer and stay fixed, each example has a learned weight instead, and
all late devices with the same program are inverted in one batch.
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
from latecomer.device.batching import reason_not_to_batch
from latecomer.device.flat import FlatModel
from latecomer.device.training import Plan, local_update
from latecomer.loading import first_line
from latecomer.strategies.parts.labels import label_shares, spread

BETAS = (0.8, 0.95)
EXAMPLE_RATE, WEIGHT_RATE = 0.3, 0.1
WARM_RATE = 0.2  # of the rates above: at full rate a warm start is shaken off
DEAD_AFTER = 10  # iterations without any gain after which a start counts as dead
STARTS = 3
GROWTH = 3.0  # a dead start is tried again with examples that much larger
PATIENCE = 10  # iterations over which a fit must improve by PLATEAU to go on
PLATEAU = 0.005
AT_ONCE = 16  # devices computed in one batch, and fewer if that takes more than ROOM
ROOM = 2**28  # floats: 1 GB
MOST = 256  # examples sought, whatever a device claims to have


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is spent on one inversion; `docs/studies/feddc.md` has the measured trade-offs.

    `samples` examples are sought; with `share` instead that part of the device's own number.
    `keep` is the part of the coordinates, the largest, that must be explained. `steps` bounds the
    training steps of the surrogate program. `scale` is the spread of the first, random examples.
    """

    samples: int = 32
    share: float = 0.0
    iterations: int = 40
    warm_iterations: int = 8
    keep: float = 1.0
    steps: int = 50
    scale: float = 1.0

    def size(self, num_examples: int) -> int:
        """The number of examples sought for a device that reports `num_examples`."""
        if not self.share:
            return self.samples
        return min(MOST, max(1, math.ceil(self.share * num_examples)))


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """D_est: examples that explain an update of a device. They stay on the server.

    `labels` are classes, or logits of learned soft labels. `fit` is the relative L1 error with
    which they explain the update they were sought for.
    """

    x: Tensor
    labels: Tensor
    weights: Tensor  # logits; a softmax over them says how much each example counts
    spec: TrainSpec
    steps: int
    fit: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Sought:
    """An update to be explained: `delta` is what training from `base` gave."""

    base: Tensor
    delta: Tensor
    spec: TrainSpec
    num_examples: int
    seed: int
    start: Estimate | None = None


def local_steps(spec: TrainSpec, num_examples: int) -> int:
    """How many optimiser steps the device's program takes on so many examples."""
    return spec.local_epochs * -(-num_examples // min(spec.batch_size, num_examples))


def effective_rate(spec: TrainSpec, steps: int) -> float:
    """The learning rate times the total weight that the gradients of all steps get.

    With momentum m, the gradient of the j-th last step is added 1 + m + ... + m^(j-1) times.
    """
    momentum = spec.momentum if spec.optimizer == "sgd" else 0.0
    repeats = (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
    return spec.lr * spec.lr_scale * repeats


def surrogate(spec: TrainSpec, num_examples: int, most: int) -> tuple[TrainSpec, int]:
    """The device's program on D_est: full-batch steps, as many as the device took or `most`.

    With fewer steps the learning rate grows, so that the effective one is the same. What a device
    is asked to tell beside its delta is no part of it.
    """
    spec = replace(spec, feedback=False) if spec.feedback else spec
    true = local_steps(spec, num_examples)
    steps = min(true, most)
    if steps == true:
        return spec, steps
    ratio = effective_rate(spec, true) / effective_rate(spec, steps)
    return replace(spec, lr_scale=spec.lr_scale * ratio), steps


def replay(network: FlatModel, params: Tensor, estimates: Sequence[Estimate]) -> list[Tensor]:
    """What the devices would send if they trained `params` now, by their estimates."""
    return replay_each(network, [params] * len(estimates), estimates)


def replay_each(
    network: FlatModel, params: Sequence[Tensor], estimates: Sequence[Estimate]
) -> list[Tensor]:
    """`replay`, each device from a model of its own."""
    deltas: list[Tensor] = [torch.empty(0)] * len(estimates)
    with torch.no_grad():
        kinds = [(e.spec, e.steps, e.x.shape, e.labels.dtype) for e in estimates]
        for places in (
            same[begin : begin + AT_ONCE]
            for same in alike(kinds)
            for begin in range(0, len(same), AT_ONCE)
        ):
            group = [estimates[i] for i in places]
            if len(group) == 1:
                # Without derivatives and batches the plain run takes less than half the time.
                base, (only,) = params[places[0]], group
                deltas[places[0]] = _train(
                    network,
                    only.spec,
                    only.steps,
                    base,
                    only.x,
                    only.labels,
                    only.weights,
                    functional=False,
                )
                continue
            bases = torch.stack([params[i] for i in places])
            run = _program(network, group[0].spec, group[0].steps)
            found = run(bases, *(torch.stack(parts) for parts in _parts(group)))
            for i, delta in zip(places, found, strict=True):
                deltas[i] = delta.clone()
    return deltas


def misfit(estimate: Tensor, truth: Tensor) -> float:
    """Relative L1 distance: 0 is perfect, 1 is what saying nothing at all would give."""
    size = truth.abs().sum().item()
    return (estimate - truth).abs().sum().item() / size if size else math.inf


def reason_not_to_invert(network: FlatModel) -> str | None:
    """Why nobody can differentiate through the training of this network; None if one can."""
    if network not in _TROUBLES:
        x = torch.zeros(1, *network.input_shape, requires_grad=True)
        parts = (network.init(0), x, torch.zeros(1, dtype=torch.int64), torch.zeros(1))
        try:
            with sdpa_kernel(SDPBackend.MATH):
                delta = _train(network, TrainSpec(), 1, *parts)
                torch.autograd.grad(delta.sum(), x, allow_unused=True)
            _TROUBLES[network] = None
        except Exception as error:  # whatever a user's network does
            _TROUBLES[network] = f"its training cannot be differentiated: {first_line(error)}"
    return _TROUBLES[network]


def _at_once(network: FlatModel, size: int, steps: int) -> int:
    """How many devices fit in a batch: what a differentiated step keeps, three times over."""
    if network not in _ACTIVATIONS:
        seen: list[int] = []
        handles = [
            part.register_forward_hook(lambda _m, _i, out: seen.append(out.numel()))
            for part in network.module.modules()
            if not list(part.children())
        ]
        with torch.no_grad():
            network.logits(network.init(0), torch.zeros(1, *network.input_shape))
        for handle in handles:
            handle.remove()
        _ACTIVATIONS[network] = sum(seen)
    floats = steps * (3 * _ACTIVATIONS[network] * size + 8 * network.layout.size)
    return max(1, min(AT_ONCE, ROOM // floats))


def invert(network: FlatModel, sought: Sequence[Sought], effort: Effort) -> list[Estimate]:
    """D_est for every update; those that share a program are worked on together."""
    found: list[Estimate | None] = [None] * len(sought)
    signatures = [
        (
            *surrogate(s.spec, s.num_examples, effort.steps),
            effort.size(s.num_examples),
            None if s.start is None else s.start.labels.dtype,
        )
        for s in sought
    ]
    for places in alike(signatures):
        _, steps, size, _ = signatures[places[0]]
        at_once = _at_once(network, size, steps)
        for begin in range(0, len(places), at_once):
            some = places[begin : begin + at_once]
            for i, estimate in zip(
                some, _invert_together(network, [sought[i] for i in some], effort), strict=True
            ):
                found[i] = estimate
    return [estimate for estimate in found if estimate is not None]


def _invert_together(
    network: FlatModel, sought: Sequence[Sought], effort: Effort
) -> list[Estimate]:
    """All from a warm start or all from scratch; what has gone wrong, from scratch again."""
    best = [s.start for s in sought if s.start is not None]
    if best:
        best = _descend(network, sought, best, effort, effort.warm_iterations, WARM_RATE)
    else:
        best = _from_scratch(network, sought, effort, 0)
    for attempt in range(1, STARTS):
        dead = [i for i, estimate in enumerate(best) if estimate.fit >= 1.0 - PLATEAU]
        if not dead:
            break
        tried = _from_scratch(network, [sought[i] for i in dead], effort, attempt)
        for i, estimate in zip(dead, tried, strict=True):
            if estimate.fit < best[i].fit:
                best[i] = estimate
    return best


def _from_scratch(
    network: FlatModel, sought: Sequence[Sought], effort: Effort, attempt: int
) -> list[Estimate]:
    """One attempt for all; those whose labels are known and those who learn them go apart."""
    found = _first_guesses(network, sought, effort, attempt)
    for places in alike([guess.labels.dtype for guess in found]):
        some, guesses = [sought[i] for i in places], [found[i] for i in places]
        done = _descend(network, some, guesses, effort, effort.iterations, 1.0)
        for i, estimate in zip(places, done, strict=True):
            found[i] = estimate
    return found


def _first_guesses(
    network: FlatModel, sought: Sequence[Sought], effort: Effort, attempt: int
) -> list[Estimate]:
    """Random examples; their labels as the output layer tells them, or soft ones to be learned."""
    guesses = []
    for s in sought:
        spec, steps = surrogate(s.spec, s.num_examples, effort.steps)
        size = effort.size(s.num_examples)
        rng = torch.Generator().manual_seed(s.seed + attempt)
        scale = effort.scale * GROWTH**attempt
        x = scale * torch.randn(size, *network.input_shape, generator=rng)
        shares = label_shares(network, s.base, s.delta, x, effective_rate(spec, steps))
        if shares is None:
            labels = torch.randn(size, network.num_classes, generator=rng)
            weights = torch.zeros(size)
        else:
            labels, weights = spread(shares, size)
        guesses.append(Estimate(x, labels, weights, spec, steps))
    return guesses


def _descend(
    network: FlatModel,
    sought: Sequence[Sought],
    starts: Sequence[Estimate],
    effort: Effort,
    iterations: int,
    rate: float,
) -> list[Estimate]:
    """Adam on the masked relative L1 error; the best examples seen on the way are kept."""
    base, delta = (torch.stack(t) for t in zip(*((s.base, s.delta) for s in sought), strict=True))
    mask = largest(delta, effort.keep)
    target = delta if mask is None else delta * mask
    scale = target.abs().sum(1).clamp_min(torch.finfo(delta.dtype).tiny)
    run = _program(network, starts[0].spec, starts[0].steps)
    x, labels, weights = (torch.stack(parts) for parts in _parts(starts))
    free = [x, weights] if labels.dtype == torch.int64 else [x, weights, labels]
    rates = [EXAMPLE_RATE, WEIGHT_RATE, EXAMPLE_RATE]
    adam = [_Adam(values, rate * own) for values, own in zip(free, rates, strict=False)]
    best_fit = torch.full((len(sought),), math.inf)
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
        seen = fit.detach()
        better = seen < best_fit
        best_fit = torch.where(better, seen, best_fit)
        for kept, values in zip(best, free, strict=True):
            kept[better] = values.detach()[better]
        fits.append(best_fit)
        if last or _has_settled(fits, iterations, rate < 1.0):
            break
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(fit.sum(), free)
        cooling = 0.5 * (1.0 + math.cos(math.pi * iteration / iterations))
        for one, values, gradient in zip(adam, free, gradients, strict=True):
            one.step(values, gradient, cooling)
    if len(best) == 3:
        labels = best[2]
    return [
        Estimate(best[0][i].clone(), labels[i].clone(), best[1][i].clone(), s.spec, s.steps, fit)
        for i, (s, fit) in enumerate(zip(starts, best_fit.tolist(), strict=True))
    ]


def _has_settled(fits: Sequence[Tensor], iterations: int, warm: bool) -> bool:
    """No device of the batch gains any more, or from scratch none has gained at all."""
    done = len(fits) - 1
    if not warm and done == DEAD_AFTER and bool((fits[-1] >= 1.0 - PLATEAU).all()):
        return True
    if done < max(PATIENCE, iterations // 2):
        return False
    return not bool((fits[-1] < fits[-1 - PATIENCE] * (1.0 - PLATEAU)).any())


def largest(delta: Tensor, keep: float) -> Tensor | None:
    """1 at the `keep` largest coordinates of each row, 0 elsewhere; None if all are kept."""
    if keep >= 1.0:
        return None
    count = max(1, math.ceil(keep * delta.shape[1]))
    places = delta.abs().topk(count, dim=1).indices
    return torch.zeros_like(delta).scatter_(1, places, 1.0)


class _Adam:
    """One variable under Adam; rows are devices and never mix. Kingma and Ba, 2015."""

    def __init__(self, values: Tensor, rate: float) -> None:
        self.rate = rate
        self.first, self.second = torch.zeros_like(values), torch.zeros_like(values)
        self.steps = 0

    @torch.no_grad()
    def step(self, values: Tensor, gradient: Tensor, cooling: float) -> None:
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        first = self.first / (1 - BETAS[0] ** self.steps)
        second = self.second / (1 - BETAS[1] ** self.steps)
        values.addcdiv_(first, second.sqrt_().add_(1e-12), value=-self.rate * cooling)


Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Found out once per network.
_UNBATCHED: "WeakKeyDictionary[FlatModel, bool]" = WeakKeyDictionary()
_TROUBLES: "WeakKeyDictionary[FlatModel, str | None]" = WeakKeyDictionary()
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
    """The surrogate program of one device: full-batch steps from `base`; returns the delta."""
    size = len(x)
    counts = (size * F.softmax(weights, 0)).expand(steps, size)
    plan = Plan(torch.arange(size).expand(steps, size), counts)
    y = labels if labels.dtype == torch.int64 else F.softmax(labels, 1)
    trained = local_update(
        network, base, x, y, spec, plan, functional=functional, weighted=not functional
    )
    return trained - base


def _program(network: FlatModel, spec: TrainSpec, steps: int) -> Program:
    """The surrogate program for stacked devices: (base, x, labels, weights) -> delta."""
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


def alike(signatures: Sequence[object]) -> list[list[int]]:
    """The places of equal signatures, in order of first appearance."""
    places: dict[object, list[int]] = {}
    for i, signature in enumerate(signatures):
        places.setdefault(signature, []).append(i)
    return list(places.values())

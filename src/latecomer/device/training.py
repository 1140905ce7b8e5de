"""Local training: mini-batch plans, losses, and the parameters after the steps of a plan.

Devices run it in place, the simulator batches it, and gradient inversion differentiates through it.
"""

import math
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device import zoo
from latecomer.device.clipping import clipped_sum, layers_of
from latecomer.device.flat import FlatModel
from latecomer.device.optimizers import OptimizerState, initial_state, optimizer_step, own_step
from latecomer.device.seeding import global_generator
from latecomer.errors import BadInput
from latecomer.loading import first_line

BATCH_STREAM = 1  # random stream of mini-batches, one of several of the same seed
LAYER_STREAM = 4  # random stream of random layers
PER_EXAMPLE_FLOATS = 2**26  # bound on per-example gradients in memory: 256 MB
MAX_EXAMPLES_AT_ONCE = 256  # in one forward pass; bounds the activations

Hook = Callable[[Tensor, int], Tensor]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class Plan(NamedTuple):
    """The mini-batches: `order` (steps, width) example indices, `mask` 1 where real, 0 padding.

    The real examples of a step come first. In a functional run the mask may be any
    non-negative weights, and may require gradients.
    """

    order: Tensor
    mask: Tensor


class StepStream(NamedTuple):
    """The random stream of a task's random layers (dropout): one seed for each training step.

    `done` is the number of steps before those of the present plan, so that a task trained in parts
    draws the same numbers.
    """

    seed: int = 0
    done: int = 0

    def at(self, step: int) -> AbstractContextManager[None]:
        """Torch's global generator, seeded for this step of the plan."""
        return global_generator(mixed(self.seed, self.done + step))


NO_STREAM = StepStream()


def layer_stream(seed: int, device: int, number: int) -> StepStream:
    """The stream of a task's random layers, independent of when and where it is trained."""
    return StepStream(mixed(seed, LAYER_STREAM, device, number))


def task_rng(seed: int, device: int, number: int) -> torch.Generator:
    """The generator of a task's mini-batches, independent of when and where it is trained."""
    return torch.Generator().manual_seed(mixed(seed, BATCH_STREAM, device, number))


def mixed(*parts: int) -> int:
    """A 64-bit hash of the parts. Steele et al. 2014, SplitMix64."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state


def plan_batches(n: int, spec: TrainSpec, rng: torch.Generator) -> Plan:
    """`local_epochs` shuffled passes over n examples; a short last batch is padded.

    With `local_steps` the passes end after `local_epochs * local_steps` mini-batches.
    """
    if n < 1:
        raise BadInput("a device needs at least one example to train on")
    width = min(spec.batch_size, n)
    passes = shuffled_passes(n, spec)
    mask = _mask(n, width, passes)
    order = torch.zeros(mask.shape, dtype=torch.int64)
    for one_pass in order.view(passes, -(-n // width) * width):
        torch.randperm(n, generator=rng, out=one_pass[:n])
    steps = spec.local_epochs * spec.epoch_steps(n)
    return Plan(order[:steps], mask[:steps])


def shuffled_passes(n: int, spec: TrainSpec) -> int:
    """Passes over n examples that a task begins."""
    return -(-spec.local_epochs * spec.epoch_steps(n) // -(-n // min(spec.batch_size, n)))


@lru_cache(maxsize=1024)
def _mask(n: int, width: int, passes: int) -> Tensor:
    mask = torch.zeros(passes, -(-n // width) * width)
    mask[:, :n] = 1.0
    return mask.view(-1, width)


@torch.no_grad()
def losses(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The loss of each example at `params`, in float64."""
    parts = zip(
        torch.split(x, MAX_EXAMPLES_AT_ONCE), torch.split(y, MAX_EXAMPLES_AT_ONCE), strict=True
    )
    found = [model.objective.losses(model.logits(params, some), of) for some, of in parts]
    return torch.cat(found).double()


def loss_rms(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> float:
    """Root mean squared loss of the examples at `params`: Oort's statistical utility."""
    return math.sqrt(losses(model, params, x, y).square().sum().item() / len(y))


def average_loss(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> float:
    """Mean loss of the examples at `params`."""
    return losses(model, params, x, y).mean().item()


def local_update(
    model: FlatModel,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
    plan: Plan,
    on_gradient: Hook | None = None,
    functional: bool = False,
    ragged: bool = False,
    weighted: bool = False,
    stream: StepStream = NO_STREAM,
) -> Tensor:
    """`params` after training on (x, y) by `spec` and `plan`; the arguments are not changed.

    If devices keep buffers of their own, these follow the parameters in the result
    (`FlatModel.extended`). `stream` seeds the random layers.

    `on_gradient(gradient, step)` replaces each gradient after clipping and averaging and before
    the optimiser; with `last_layer_only` it gets the coordinates of the output layer alone.

    `functional` computes the same in a form that torch.autograd can differentiate and
    torch.func.vmap can batch, at a higher cost per call. With `ragged`, functional steps without
    a real example change nothing (in place they are skipped, unless there is an `on_gradient`).
    With `weighted` the mask holds weights, as it always does in a functional run.
    """
    if not functional and not weighted and on_gradient is None:
        return resumed_update(model, params, params, None, x, y, spec, plan, stream)[0]
    return _train(
        model, params, params, None, x, y, spec, plan, stream, on_gradient, functional, ragged,
        weighted,
    )[0]  # fmt: skip


def resumed_update(
    model: FlatModel,
    params: Tensor,
    anchor: Tensor,
    state: OptimizerState | None,
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
    plan: Plan,
    stream: StepStream = NO_STREAM,
) -> tuple[Tensor, OptimizerState]:
    """Parameters and optimiser state after the steps of `plan`, resuming an earlier training.

    `anchor` are the parameters at its start, to which `spec.prox` pulls; `state` is that of the
    optimiser, None at the start. A plan cut into parts gives bit for bit the result of the whole.
    """
    if model.kernel is not None and model.kernel.covers(spec):
        return model.kernel.train(params, anchor, state, x, y, spec, plan)
    return _train(model, params, anchor, state, x, y, spec, plan, stream)


def _train(
    model: FlatModel,
    params: Tensor,
    anchor: Tensor,
    state: OptimizerState | None,
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
    plan: Plan,
    stream: StepStream,
    on_gradient: Hook | None = None,
    functional: bool = False,
    ragged: bool = False,
    weighted: bool = False,
) -> tuple[Tensor, OptimizerState]:
    plain = not functional and not weighted
    span = model.head if spec.last_layer_only else slice(0, model.layout.trained)
    home, device = params.device, model.device
    whole = params if functional else model.extended(params.detach()).clone()
    whole, anchor, x, y = (each.to(device) for each in (whole, anchor, x, y))
    base, moving = anchor[span], whole[span]
    gradient_at = _gradient_function(model, whole, span, spec, functional, stream.done)
    step_of = (
        own_step(spec.optimizer, _bound_in(model, whole, span, stream.done), spec)
        if ":" in spec.optimizer
        else optimizer_step(spec.optimizer)
    )
    # With the output layer alone, the layers before it are used as they are.
    model.set_mode(training=True, statistics=not spec.last_layer_only)
    add = Tensor.add if functional else Tensor.add_
    take = _take_batched if functional else _take
    sizes = plan.mask.sum(1).int().tolist() if plain else None
    state = initial_state(moving) if state is None else _on(state, device)
    with torch.set_grad_enabled(functional and torch.is_grad_enabled()):
        steps = zip(plan.order.unbind(), plan.mask.to(device).unbind(), strict=True)
        for step, (index, weights) in enumerate(steps):
            real: Tensor | None = weights
            if sizes is not None:
                if not sizes[step] and on_gradient is None:
                    continue  # privacy noise is added even to an empty step
                index, real = index[: sizes[step]], None
            if model.traits.mixing and len(index) < 2:
                # A single example has no variance: the running statistics are used.
                model.set_mode(True, statistics=False)
            with stream.at(step) if model.traits.random else nullcontext():
                gradient = gradient_at(moving, take(x, index), take(y, index), real)
            if model.traits.mixing and len(index) < 2:
                model.set_mode(True, statistics=not spec.last_layer_only)
                model.set_counters(stream.done + step + 1)
            if on_gradient is not None:
                # The optimiser may work in place; the hook's tensor must not change.
                # Noise is drawn where the vectors are, so that it does not depend on the device.
                gradient = on_gradient(gradient.to(home), step).to(device, copy=True)
            if spec.prox:
                gradient = add(gradient, moving - base, alpha=spec.prox)
            moved, new_state = step_of(moving, gradient, state, spec, add)
            if functional and ragged:
                live = weights.sum() > 0
                moved = torch.where(live, moved, moving)
                new_state = OptimizerState(
                    *(
                        new if new is old else torch.where(live, new, old)
                        for new, old in zip(new_state, state, strict=True)
                    )
                )
            moving, state = moved, new_state
    if not functional and model.traits.buffers:
        model.collect(whole)
    trained = _join(whole, moving, span) if functional else whole
    return trained.to(home), _on(state, home)


def _gradient_function(
    model: FlatModel, whole: Tensor, span: slice, spec: TrainSpec, functional: bool, done: int
) -> Gradient:
    """The gradient function: clipped per example, functional, or on parameters bound in place."""

    def loss_at(moving: Tensor, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        outputs = model.logits(_join(whole, moving, span), x, training=True)
        return model.objective.mean(outputs, y, weights)

    if spec.clip > 0:

        def clipped_at(moving: Tensor, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
            return _clipped(loss_at, moving, x, y, weights, spec)

        layers = (
            None
            if functional or spec.last_layer_only
            else layers_of(model.module, model.bind(whole))
        )
        if layers is None:
            return clipped_at

        def at_once(moving: Tensor, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
            total = (
                clipped_sum(model.module, model.objective, layers, x, y, spec)
                if weights is None and len(x)
                else None
            )
            return clipped_at(moving, x, y, weights) if total is None else total / len(x)

        return at_once
    if functional:
        return torch.func.grad(loss_at)

    leaves = _bound_in(model, whole, span, done)

    def gradient_at(moving: Tensor, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        with torch.enable_grad():
            loss = model.objective.mean(model.module(x), y, weights)
        pieces = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    return gradient_at


def _bound_in(model: FlatModel, whole: Tensor, span: slice, done: int) -> list[nn.Parameter]:
    """The parameters of the module in `span`, bound to `whole`."""
    bound = model.bind(whole, done)
    return [p for p in bound if span.start <= p.storage_offset() < span.stop]


def _clipped(
    loss_at: Gradient, moving: Tensor, x: Tensor, y: Tensor, weights: Tensor | None, spec: TrainSpec
) -> Tensor:
    """The mean of per-example gradients, each clipped to a norm of `spec.clip`."""

    def example_gradient(moving: Tensor, x: Tensor, y: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(loss_at)(moving, x.unsqueeze(0), y.unsqueeze(0), None)
        return gradient

    if weights is None:
        weights = x.new_ones(len(x))
    weights = weights.to(moving.dtype)
    rows = max(1, PER_EXAMPLE_FLOATS // moving.numel())
    total = torch.zeros_like(moving)
    for begin in range(0, len(x), rows):
        part = slice(begin, begin + rows)
        gradients = torch.func.vmap(example_gradient, in_dims=(None, 0, 0), randomness="different")(
            moving, x[part], y[part]
        )
        norms = torch.linalg.vector_norm(gradients, spec.clip_norm, dim=1)
        # An overflow must not reach the sum: it would leave the device un-noised.
        usable = norms.isfinite()
        gradients = torch.where(usable.unsqueeze(1), gradients, 0.0)
        norms = torch.where(usable, norms, 1.0)
        factors = (spec.clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        total = total + (weights[part] * factors) @ gradients
    return total / _count(weights)


def _count(weights: Tensor) -> Tensor:
    total = weights.sum()
    return total + (total == 0)


# Both select rows: index_select is 4x faster alone, indexing 2x faster under vmap.
def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.index_select(0, index.to(values.device))


def _take_batched(values: Tensor, index: Tensor) -> Tensor:
    return values[index.to(values.device)]


def _on(state: OptimizerState, device: torch.device) -> OptimizerState:
    """The state on a device; the step count stays where it is."""
    return state._replace(first=state.first.to(device), second=state.second.to(device))


def _join(whole: Tensor, moving: Tensor, span: slice) -> Tensor:
    """`whole` with `moving` at `span`."""
    if moving.numel() == whole.numel():
        return moving
    return torch.cat([whole[: span.start], moving, whole[span.stop :]])


# Layers of torch without a batched form: vmap runs them one by one, several times slower.
UNBATCHED = (nn.LSTM, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def reason_not_to_batch(model: FlatModel) -> str | None:
    """Why several of these networks are not trained at once under vmap; None if they can be.

    Known from the layers; a network with a user's own layers is tried out.
    """
    if reason := model.traits.reason_not_pure:
        return reason
    if not model.objective.per_example:
        return "its loss gives a mean over the batch, not one value per example"
    own = model.objective.function is not None
    for name, part in model.module.named_modules():
        if isinstance(part, UNBATCHED):
            return f"{type(part).__name__} at '{name}' has no batched form in torch"
        own = own or not type(part).__module__.startswith(("torch.nn.", zoo.__name__))
    return _failed_trial(model) if own else None


def _failed_trial(model: FlatModel) -> str | None:
    """Why training two networks at once fails or is emulated; None if it works."""
    params = torch.stack([model.init(0)] * 2)
    x, y = torch.stack([model.example(1)] * 2), model.objective.placeholder(2, 1)
    plan = Plan(torch.zeros(2, 1, 1, dtype=torch.int64), torch.ones(2, 1, 1))

    def train(params: Tensor, x: Tensor, y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
        plan = Plan(order, mask)
        return local_update(model, params, x, y, TrainSpec(), plan, functional=True, ragged=True)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            torch.func.vmap(train)(params, x, y, *plan)
        except Exception as error:  # whatever a user's network does under vmap
            return f"its network cannot be batched: {first_line(error)}"
    for warning in warned:
        if "batching rule" in str(warning.message):
            found = re.search(r"aten::\w+", str(warning.message))
            return f"{found.group() if found else 'an operation'} has no batched form in torch"
    return None

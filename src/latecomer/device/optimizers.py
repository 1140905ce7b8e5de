"""The optimiser steps of local training, equal to those of torch.optim, on flat vectors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.errors import BadInput, unknown
from latecomer.loading import first_line, load_callable

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
ALPHA, ADAGRAD_EPS = 0.99, 1e-10
# Far below EPS squared: keeps the derivative of the square root finite at zero.
TINY = 1e-30


class OptimizerState(NamedTuple):
    """First and second moment of the gradients (SGD: velocity and zeros) and the step count."""

    first: Tensor
    second: Tensor
    steps: Tensor


class Add(Protocol):
    """`Tensor.add` or `Tensor.add_`: one step function serves functional and in-place training."""

    def __call__(self, a: Tensor, b: Tensor, /, *, alpha: float = 1) -> Tensor: ...


Step = Callable[[Tensor, Tensor, OptimizerState, TrainSpec, Add], tuple[Tensor, OptimizerState]]


def initial_state(params: Tensor) -> OptimizerState:
    """The state before the first step: all zeros."""
    zero = torch.zeros_like(params)
    # float64: 1 - 0.999 has no digits to spare.
    return OptimizerState(zero, zero, torch.zeros((), dtype=torch.float64))


def sgd(
    params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
) -> tuple[Tensor, OptimizerState]:
    """Heavy-ball momentum without dampening; momentum 0 is plain SGD."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    if spec.momentum:
        gradient = add(gradient, state.first, alpha=spec.momentum)
        state = state._replace(first=gradient)
    return add(params, gradient, alpha=-spec.lr * spec.lr_scale), state


def adam(
    params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
) -> tuple[Tensor, OptimizerState]:
    """Adam with the default constants and L2 weight decay. Kingma and Ba, 2015."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    steps = state.steps + 1
    first = torch.lerp(state.first, gradient, 1 - BETA1)
    second = torch.addcmul(state.second * BETA2, gradient, gradient, value=1 - BETA2)
    scale1 = (1 - BETA1**steps).to(params.dtype)
    scale2 = (1 - BETA2**steps).sqrt().to(params.dtype)
    direction = first / scale1 / ((second + TINY).sqrt() / scale2 + EPS)
    return add(params, direction, alpha=-spec.lr * spec.lr_scale), OptimizerState(
        first, second, steps
    )


def adamw(
    params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
) -> tuple[Tensor, OptimizerState]:
    """Adam whose weight decay does not pass through the moments. Loshchilov and Hutter, 2019."""
    plain = replace(spec, weight_decay=0.0)
    if spec.weight_decay:
        # A copy: `add` may work in place.
        params = add(params, params.clone(), alpha=-spec.lr * spec.lr_scale * spec.weight_decay)
    return adam(params, gradient, state, plain, add)


def rmsprop(
    params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
) -> tuple[Tensor, OptimizerState]:
    """Gradients over the root of their mean square, which keeps 0.99 per step; no momentum."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    second = torch.addcmul(state.second * ALPHA, gradient, gradient, value=1 - ALPHA)
    direction = gradient / ((second + TINY).sqrt() + EPS)
    return add(params, direction, alpha=-spec.lr * spec.lr_scale), state._replace(second=second)


def adagrad(
    params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
) -> tuple[Tensor, OptimizerState]:
    """Gradients over the root of the sum of their squares. Duchi et al., 2011."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    second = torch.addcmul(state.second, gradient, gradient)
    direction = gradient / ((second + TINY).sqrt() + ADAGRAD_EPS)
    return add(params, direction, alpha=-spec.lr * spec.lr_scale), state._replace(second=second)


STEPS: dict[str, Step] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "adagrad": adagrad,
}


def optimizer_step(name: str) -> Step:
    """The step function of the optimiser called `name`; BadInput if there is none."""
    if name not in STEPS:
        raise unknown("optimizer", name, STEPS, "your own as module:callable")
    return STEPS[name]


def own_step(name: str, parameters: Sequence[nn.Parameter], spec: TrainSpec) -> Step:
    """The step of the torch.optim.Optimizer that `module:callable` makes of (parameters, lr).

    It changes the parameters in place. Its state belongs to one task.
    """
    build = load_callable(name, "training.optimizer")
    try:
        optimizer = build(parameters, spec.lr * spec.lr_scale)
    except Exception as error:
        raise BadInput(
            f"training.optimizer '{name}': calling it with (parameters, lr) failed:"
            f" {first_line(error)}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise BadInput(f"training.optimizer '{name}': gave a {kind}, not a torch.optim.Optimizer")
    sizes = [p.numel() for p in parameters]

    def step(
        params: Tensor, gradient: Tensor, state: OptimizerState, spec: TrainSpec, add: Add
    ) -> tuple[Tensor, OptimizerState]:
        for parameter, piece in zip(parameters, torch.split(gradient, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return params, state

    return step

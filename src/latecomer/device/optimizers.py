"""The optimiser steps of local training, equal to those of torch.optim, on flat vectors."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from latecomer.core.messages import TrainSpec
from latecomer.errors import BadInput

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
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


STEPS: dict[str, Step] = {"sgd": sgd, "adam": adam}


def optimizer_step(name: str) -> Step:
    """The step function of the optimiser called `name`; BadInput if there is none."""
    if name not in STEPS:
        raise BadInput(f"unknown optimizer '{name}': use one of {', '.join(STEPS)}")
    return STEPS[name]

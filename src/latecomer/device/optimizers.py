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


class Memory(NamedTuple):
    """What an optimiser carries from step to step; empty before the first."""

    first: Tensor
    second: Tensor
    steps: Tensor


class Add(Protocol):
    """`Tensor.add` or `Tensor.add_`: one rule serves both the pure and the in-place run."""

    def __call__(self, a: Tensor, b: Tensor, /, *, alpha: float = 1) -> Tensor: ...


Rule = Callable[[Tensor, Tensor, Memory, TrainSpec, Add], tuple[Tensor, Memory]]


def start(params: Tensor) -> Memory:
    """The memory before the first step."""
    zero = torch.zeros_like(params)
    # float64: 1 - 0.999 has no digits to spare.
    return Memory(zero, zero, torch.zeros((), dtype=torch.float64))


def sgd(
    params: Tensor, gradient: Tensor, memory: Memory, spec: TrainSpec, add: Add
) -> tuple[Tensor, Memory]:
    """Heavy-ball momentum without dampening; momentum 0 is plain SGD."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    if spec.momentum:
        gradient = add(gradient, memory.first, alpha=spec.momentum)
        memory = memory._replace(first=gradient)
    return add(params, gradient, alpha=-spec.lr * spec.lr_scale), memory


def adam(
    params: Tensor, gradient: Tensor, memory: Memory, spec: TrainSpec, add: Add
) -> tuple[Tensor, Memory]:
    """Adam with the usual constants and L2 weight decay. Kingma and Ba, 2015."""
    if spec.weight_decay:
        gradient = add(gradient, params, alpha=spec.weight_decay)
    steps = memory.steps + 1
    first = torch.lerp(memory.first, gradient, 1 - BETA1)
    second = torch.addcmul(memory.second * BETA2, gradient, gradient, value=1 - BETA2)
    scale1 = (1 - BETA1**steps).to(params.dtype)
    scale2 = (1 - BETA2**steps).sqrt().to(params.dtype)
    direction = first / scale1 / ((second + TINY).sqrt() / scale2 + EPS)
    return add(params, direction, alpha=-spec.lr * spec.lr_scale), Memory(first, second, steps)


RULES: dict[str, Rule] = {"sgd": sgd, "adam": adam}


def rule_named(name: str) -> Rule:
    """The step of the optimiser called `name`."""
    if name not in RULES:
        raise BadInput(f"unknown optimizer '{name}': use one of {', '.join(RULES)}")
    return RULES[name]

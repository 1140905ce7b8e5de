"""A user's own local training: train(model, dataset, context) in place of the built-in program."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.seeding import all_seeded
from latecomer.errors import BadInput
from latecomer.loading import at, first_line

EXAMPLES = ("num_examples", "num-examples", "examples")  # keys for the number of examples


@dataclass(frozen=True)
class TrainContext:
    """What a training function may use besides the model and the data.

    lr: learning rate of this task, after the schedule.
    local_epochs, local_steps, batch_size, optimizer, momentum, weight_decay, prox: as in the config
        or as the strategy changes them; it is the function's choice to follow them.
    device: the torch device of the model and of the examples.
    generator: a torch generator of this task; the global ones of torch, numpy and random are
        seeded for the task, too.
    seed: the seed of this task.
    number: how many tasks the device did before this one.
    client: the number of the device in the fleet; always 0 on a real device.
    config: the config of the run as nested dicts; on a real device what its app gives.
    """

    lr: float
    local_epochs: int
    local_steps: int
    batch_size: int
    optimizer: str
    momentum: float
    weight_decay: float
    prox: float
    device: torch.device
    generator: torch.Generator
    seed: int
    number: int
    client: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


TrainFunction = Callable[
    [nn.Module, "Dataset[tuple[Tensor, ...]]", TrainContext], Mapping[str, float] | int | None
]


@dataclass(frozen=True)
class Reported:
    """The number of examples that a training function used, and its metrics."""

    num_examples: int
    metrics: Mapping[str, float]


def own_update(
    function: TrainFunction,
    model: FlatModel,
    params: Tensor,
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
    seed: int,
    number: int,
    client: int,
    config: Mapping[str, Any],
) -> tuple[Tensor, Reported]:
    """The parameters after `function` has trained a copy of the module, and what it reported.

    The copy belongs to this task, so nothing that the function adds to it reaches the next.
    """
    module = model.copy_at(params)
    context = TrainContext(
        spec.lr * spec.lr_scale,
        spec.local_epochs,
        spec.local_steps,
        spec.batch_size,
        spec.optimizer,
        spec.momentum,
        spec.weight_decay,
        spec.prox,
        model.device,
        torch.Generator().manual_seed(seed),
        seed,
        number,
        client,
        config,
    )
    with all_seeded(seed), torch.enable_grad():
        dataset = TensorDataset(x.to(model.device), y.to(model.device))
        try:
            returned = function(module, dataset, context)
        except (BadInput, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a user's function may raise anything
            raise BadInput(
                f"training.function: it failed: {first_line(error)}{at(error)}"
            ) from error
    _check_shapes(model, module)
    return model.vector_of(module), _reported(returned, len(y))


def _check_shapes(model: FlatModel, module: nn.Module) -> None:
    """BadInput if a tensor of the trained module is gone or has another shape."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
    for name, shape in zip(model.whole.names, model.whole.shapes, strict=True):
        if (now := shapes.get(name)) != shape:
            raise BadInput(
                f"training.function: '{name}' of the model had shape {shape} before it and has"
                f" {now or 'none'} after; it must change values in place, not replace layers"
            )


def _reported(returned: object, examples: int) -> Reported:
    """What the function returned; BadInput if it cannot be used."""
    if returned is None:
        return Reported(examples, {})
    if isinstance(returned, int) and not isinstance(returned, bool):
        returned = {EXAMPLES[0]: returned}
    if not isinstance(returned, Mapping):
        raise BadInput(
            f"training.function: it returned a {type(returned).__name__}; allowed are a dict with"
            " num_examples and metrics, the number of examples, or nothing (the model is changed in"
            " place)"
        )
    metrics = {str(name): value for name, value in returned.items() if name not in EXAMPLES}
    count = next((returned[name] for name in EXAMPLES if name in returned), examples)
    try:
        whole = float(count) >= 1 and float(count).is_integer()
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise BadInput(f"training.function: num_examples = {count!r}: allowed is 1 or more")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise BadInput(
                f"training.function: metric {name!r} is a {type(value).__name__}, not a number"
            ) from None
        if not math.isfinite(numbers[name]):
            raise BadInput(f"training.function: metric {name!r} is {value}; it must be finite")
    return Reported(int(count), numbers)

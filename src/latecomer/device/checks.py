"""Checks that training a network is a pure function of tensors, and that its shapes fit."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from latecomer.device.objective import Objective, classification
from latecomer.device.seeding import global_generator
from latecomer.errors import BadInput
from latecomer.loading import first_line


def check_model(
    module: nn.Module,
    input_shape: tuple[int, ...],
    num_classes: int,
    label: str = "model",
    objective: Objective | None = None,
) -> None:
    """Raise BadInput, naming an alternative, if `module` keeps state, draws numbers or misfits."""
    for name, part in module.named_modules():
        kind, where = type(part).__name__, f"at '{name}'" if name else "at the top"
        if isinstance(part, _BatchNorm):
            raise BadInput(
                f"{label}: {kind} {where} mixes the examples of a batch and keeps running "
                f"statistics; use nn.GroupNorm instead"
            )
        if isinstance(part, _DropoutNd) and part.p > 0:
            raise BadInput(
                f"{label}: {kind}(p={part.p:g}) {where} makes training random; "
                f"use p=0 or leave it out, and regularise with weight_decay"
            )
    _check_forward(module, input_shape, objective or classification(num_classes), label)
    for name, _ in module.named_buffers():
        raise BadInput(
            f"{label}: buffer '{name}' is state outside the parameters and would not be sent; "
            f"use an nn.Parameter, a plain attribute or a layer without running statistics"
        )
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if not names:
        raise BadInput(f"{label}: no parameters to train; use a module with nn.Parameter")
    distinct = dict(module.named_parameters())
    for name in names:
        if name not in distinct:
            raise BadInput(
                f"{label}: parameter '{name}' is shared with another layer; give each its own"
            )
        if not distinct[name].requires_grad:
            raise BadInput(
                f"{label}: parameter '{name}' is frozen (requires_grad=False); "
                f"unfreeze it, or train the output layer alone with last_layer_only"
            )


def _check_forward(
    module: nn.Module, input_shape: tuple[int, ...], objective: Objective, label: str
) -> None:
    batch = torch.zeros(2, *input_shape)
    with global_generator():
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                output = module(batch)
        except Exception as error:
            raise BadInput(
                f"{label}: forward fails on a batch of shape {tuple(batch.shape)}: "
                f"{first_line(error)}"
            ) from error
        draws = not torch.equal(before, torch.get_rng_state())
    if draws:
        raise BadInput(
            f"{label}: forward draws random numbers (functional dropout?); "
            f"take the randomness out of forward"
        )
    given = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    wanted = objective.output_shapes(len(batch))
    if given not in wanted if wanted else not isinstance(output, torch.Tensor):
        raise BadInput(
            f"{label}: forward must give {objective.wanted_outputs}, but gave {given}"
            f" for a batch of {len(batch)}"
        )

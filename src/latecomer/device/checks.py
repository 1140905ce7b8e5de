"""What training and using a network does besides computing outputs, found by two forward passes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from latecomer.device.objective import Objective
from latecomer.device.seeding import global_generator
from latecomer.errors import BadInput
from latecomer.loading import first_line

COUNTER = "num_batches_tracked"  # of normalisation layers: the number of their training steps


@dataclass(frozen=True)
class Traits:
    """Properties of a network that decide how it is trained.

    random: whether a forward pass in training mode draws random numbers, e.g. for dropout.
    random_in_use: whether one in evaluation mode does.
    buffers: names of the float buffers that a forward pass in training mode changes, e.g. the
        running statistics of BatchNorm.
    mixing: a layer whose output for an example depends on the others of the batch, as text; empty
        if there is none.
    """

    random: bool = False
    random_in_use: bool = False
    buffers: tuple[str, ...] = ()
    mixing: str = ""

    @property
    def reason_not_pure(self) -> str | None:
        """Why training is no function of parameters and examples alone; None if it is."""
        if self.reason_not_per_example:
            return self.reason_not_per_example
        return "its layers draw random numbers in training (dropout)" if self.random else None

    @property
    def reason_not_per_example(self) -> str | None:
        """Why training has no gradient of its own for each example; None if it has."""
        if self.mixing:
            return f"{self.mixing} mixes the examples of a batch"
        return f"training changes the buffer '{self.buffers[0]}'" if self.buffers else None


def examine(module: nn.Module, batch: Tensor, objective: Objective, label: str = "model") -> Traits:
    """The traits of `module`, whose buffers are left unchanged; BadInput if it cannot be trained.

    `batch` are two examples, by which the shapes are checked.
    """
    if not any(p.requires_grad for p in module.parameters()):
        some = next(module.parameters(), None)
        problem = "no parameters to train" if some is None else "all parameters are frozen"
        raise BadInput(f"{label}: {problem}; use a module with nn.Parameter of requires_grad=True")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise BadInput(f"{label}: parameter '{name}' is {parameter.dtype}; use a real one")
    mixing = ""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm):
            mixing = mixing or f"{type(part).__name__} {_at(name)}"
            if not part.track_running_stats:
                raise BadInput(
                    f"{label}: {type(part).__name__} {_at(name)} has no running statistics to use"
                    " the model with; set track_running_stats=True, or use nn.GroupNorm"
                )
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with global_generator():
        output, random = forward(module.train(), batch, label)
        changed = [name for name in before if not _same(before[name], module.get_buffer(name))]
        for name in changed:
            set_buffer(module, name, before[name])
        _, random_in_use = forward(module.eval(), batch, label)
    for name in changed:
        set_buffer(module, name, before[name])
    _check_output(output, len(batch), objective, label)
    counters = {name for name, _, _ in counters_of(module)}
    for name in changed:
        if name not in counters and not before[name].is_floating_point():
            raise BadInput(
                f"{label}: training changes the buffer '{name}' of {before[name].dtype}, which"
                " cannot be averaged over devices; make it a float buffer"
            )
    buffers = tuple(name for name in changed if name not in counters)
    return Traits(random, random_in_use, buffers, mixing)


def check_clipping(traits: Traits, setting: str) -> None:
    """BadInput if `setting` asks for per-example gradients and the network has none."""
    if reason := traits.reason_not_per_example:
        raise BadInput(
            f"{setting} clips the gradient of each example, but {reason};"
            " use nn.GroupNorm in the model, or privacy.where = 'update' and training.clip = 0"
        )


def counters_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, layer and value of every counter of training steps in normalisation layers."""
    for name, part in module.named_modules():
        if isinstance(part, _NormBase) and isinstance(part.num_batches_tracked, Tensor):
            yield f"{name}.{COUNTER}" if name else COUNTER, part, part.num_batches_tracked


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` the buffer of this name, without a copy."""
    owner, _, key = name.rpartition(".")
    module.get_submodule(owner)._buffers[key] = value


def forward(module: nn.Module, batch: Tensor, label: str) -> tuple[object, bool]:
    """The output of the module for `batch`, and whether it drew random numbers."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad():
            output = module(batch)
    except Exception as error:
        raise BadInput(
            f"{label}: forward fails on a batch of shape {tuple(batch.shape)}: {first_line(error)}"
        ) from error
    return output, not torch.equal(before, torch.get_rng_state())


def _check_output(output: object, n: int, objective: Objective, label: str) -> None:
    given = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if isinstance(given, str) or not objective.accepts(given, n):
        raise BadInput(
            f"{label}: forward must give {objective.wanted_outputs}, but gave {given}"
            f" for a batch of {n}"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _at(name: str) -> str:
    return f"at '{name}'" if name else "at the top"

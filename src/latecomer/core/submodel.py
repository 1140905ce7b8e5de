"""Sub-models: the part of the model that a device trains, as an index map into the flat vector."""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from latecomer.core.params import Layout
from latecomer.errors import BadInput


@dataclass(frozen=True, eq=False)
class Submodel:
    """The covered coordinates of the whole vector, in the order of the device's own vector."""

    name: str
    index: Tensor

    def take(self, whole: Tensor) -> Tensor:
        """Whole-model coordinates -> device coordinates."""
        return whole[self.index]


def covered(submodel: Submodel | None) -> Tensor | slice:
    """An index of the covered coordinates of the whole vector; None means all of it."""
    return slice(None) if submodel is None else submodel.index


def name_of(submodel: Submodel | None) -> str:
    """The name of the sub-model; empty for the whole model."""
    return "" if submodel is None else submodel.name


def take(whole: Tensor, submodel: Submodel | None) -> Tensor:
    """The coordinates of `whole` that `submodel` covers; None: all."""
    return whole if submodel is None else submodel.take(whole)


def prefix(whole: Layout, part: Layout, name: str) -> Submodel:
    """The sub-model of a network whose every tensor is a corner of the whole one's.

    Element (i, j, ...) of the part is element (i, j, ...) of the whole; BadInput names the first
    parameter for which there is none.
    """
    for ours, theirs in zip_longest(whole.names, part.names):
        if ours != theirs:
            raise BadInput(f"parameter {theirs!r} is in the place of {ours!r} of the whole network")
    index = [
        whole.span(parameter).start + _corner(parameter, outer, inner)
        for parameter, outer, inner in zip(whole.names, whole.shapes, part.shapes, strict=True)
    ]
    return Submodel(name, torch.cat(index))


def _corner(parameter: str, outer: tuple[int, ...], inner: tuple[int, ...]) -> Tensor:
    """Where the elements of `inner` lie in the flattened `outer`, in increasing order."""
    if len(inner) != len(outer) or any(n > m for n, m in zip(inner, outer, strict=True)):
        raise BadInput(
            f"parameter {parameter!r} has shape {inner}, which is no corner of the whole "
            f"network's {outer}"
        )
    index = torch.zeros((), dtype=torch.int64)
    for short, long in zip(inner, outer, strict=True):
        index = index.unsqueeze(-1) * long + torch.arange(short)
    return index.reshape(-1)

"""A part of the model that a device can carry, as an index map into the flat vector."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Submodel:
    """The covered coordinates of the whole vector, in the order of the device's own vector."""

    name: str
    index: Tensor

    @property
    def size(self) -> int:
        return self.index.numel()

    def take(self, whole: Tensor) -> Tensor:
        """Whole-model coordinates -> device coordinates."""
        return whole[self.index]


def covered(submodel: Submodel | None) -> Tensor | slice:
    """An index of the covered coordinates of the whole vector; None means all of it."""
    return slice(None) if submodel is None else submodel.index


def name_of(submodel: Submodel | None) -> str:
    """Tells networks apart; that of the whole model has no name."""
    return "" if submodel is None else submodel.name


def take(whole: Tensor, submodel: Submodel | None) -> Tensor:
    """What a device with `submodel` sees of the whole vector; None means all of it."""
    return whole if submodel is None else submodel.take(whole)

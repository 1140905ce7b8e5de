"""A model that is known by its named arrays alone, because an app of the user's trains it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from latecomer.core.arrays import ArrayLayout
from latecomer.device.checks import Traits
from latecomer.device.flat import FlatModel
from latecomer.device.objective import Objective


class ArrayModel(FlatModel):
    """The initial arrays of an app in place of a network; outputs cannot be computed.

    `initial` is the float32 vector of the averaged arrays.
    """

    def __init__(self, arrays: ArrayLayout, initial: Tensor) -> None:
        self.arrays = arrays
        self.layout = self.whole = arrays.layout
        self.input_shape, self.input_dtype, self.num_classes = (), torch.float32, 0
        self.objective = Objective("app", "own", 1, function=_no_loss)
        self.module = nn.Module()
        self.traits = Traits()
        self.kernel, self.device = None, torch.device("cpu")
        self.opaque = "devices run a ClientApp"
        self._initial = initial

    def to(self, device: torch.device) -> None:
        """The app chooses its device itself."""

    def init(self, seed: int) -> Tensor:
        return self._initial.clone()

    def named(self, params: Tensor, unaveraged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All arrays of the model by name, in their own dtypes."""
        joined = self.arrays.join(params, unaveraged)
        return {name: torch.from_numpy(array) for name, array in joined.items()}


def _no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    raise NotImplementedError("the loss of an app is not known")

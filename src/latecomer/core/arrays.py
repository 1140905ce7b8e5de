"""Models as named arrays of any dtype: their floats in one vector, other arrays beside it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from latecomer.core.params import Layout
from latecomer.errors import BadInput

# Floats of normalisation layers that are averaged, but not trained; by the end of their names.
STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance", "moving_var")
VARIANCES = ("running_var", "moving_variance", "moving_var")  # never below 0


@dataclass(frozen=True)
class ArrayLayout:
    """How the named arrays of a model are held by a server.

    names, dtypes, shapes: of all arrays, in their order.
    layout: of the float32 vector that strategies average: all arrays of a float dtype, those of
        normalisation statistics last. Any other array (integers, booleans) is not averaged.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "ArrayLayout":
        """The layout of these arrays; BadInput if one has a dtype that cannot be held."""
        for name, array in arrays.items():
            if array.dtype.kind not in "fiub":
                raise BadInput(
                    f"array {name!r} is of {array.dtype}: allowed are floats, integers, booleans"
                )
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        if not sum(arrays[name].size for name in floats):
            raise BadInput("the initial arrays have no floats: there is nothing to average")
        statistics = [name for name in floats if name.endswith(STATISTICS)]
        trained = [name for name in floats if name not in statistics]
        ordered = (*trained, *statistics)
        layout = Layout(ordered, tuple(arrays[name].shape for name in ordered), len(statistics))
        dtypes = tuple(str(array.dtype) for array in arrays.values())
        return cls(tuple(arrays), dtypes, tuple(a.shape for a in arrays.values()), layout)

    def split(self, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
        """The float32 vector of the arrays, and the arrays that are not averaged."""
        pieces = [arrays[name].astype(np.float32).reshape(-1) for name in self.layout.names]
        averaged = set(self.layout.names)
        others = {name: arrays[name] for name in self.names if name not in averaged}
        return torch.from_numpy(np.concatenate(pieces)), {
            name: torch.from_numpy(np.array(array, order="C")) for name, array in others.items()
        }

    def join(self, vector: Tensor, unaveraged: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The arrays in their own dtypes and order; variances below 0 become 0."""
        averaged = self.layout.unflatten(vector.detach())
        found = {}
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            tensor = averaged[name] if name in averaged else unaveraged[name]
            if name.endswith(VARIANCES):
                tensor = tensor.clamp(min=0.0)
            found[name] = np.array(tensor.numpy(), dtype=dtype)
        return found

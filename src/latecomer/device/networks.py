"""A network and its sub-models of smaller width, for devices with less compute."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from latecomer.core.params import Layout
from latecomer.core.submodel import Submodel, name_of, prefix
from latecomer.device.flat import Buffers, FlatModel, flat_model
from latecomer.device.models import label_of
from latecomer.device.objective import Objective
from latecomer.errors import BadInput


class Networks:
    """The whole network and narrower ones, whose parameters are prefix slices of the whole.

    Called with a sub-model, it returns the network of that name, None if there is none. Widths
    that round to the same layers share one sub-model. `submodels` is ordered from wide to narrow.
    """

    def __init__(
        self,
        whole: FlatModel,
        narrower: Mapping[float, FlatModel] | None = None,
        label: str = "model",
    ) -> None:
        self.whole = whole
        self.submodels: dict[float, Submodel | None] = {1.0: None}
        self._models = {"": whole}
        shared: dict[Layout, Submodel] = {}
        for width, model in sorted((narrower or {}).items(), reverse=True):
            if model.layout not in shared:
                shared[model.layout] = self._part(width, model, f"{label} at width {width:g}")
                self._models[f"width-{width:g}"] = model
            self.submodels[width] = shared[model.layout]

    def _part(self, width: float, model: FlatModel, label: str) -> Submodel:
        if model.traits.buffers:
            raise BadInput(
                f"{label}: training changes the buffer '{model.traits.buffers[0]}', whose values"
                " differ from width to width; use nn.GroupNorm"
            )
        if any(not p.requires_grad for p in model.module.parameters()):
            raise BadInput(f"{label}: frozen parameters are not sent, so no device has a part")
        if model.layout == self.whole.layout:
            raise BadInput(f"{label}: nothing is pruned; it needs hidden layers that width reduces")
        try:
            return prefix(self.whole.layout, model.layout, f"width-{width:g}")
        except BadInput as error:
            raise BadInput(f"{label}: {error}") from None

    def __call__(self, submodel: Submodel | None) -> FlatModel | None:
        return self.named(name_of(submodel))

    def named(self, name: str) -> FlatModel | None:
        """The network of the sub-model of this name; the whole network has the empty name."""
        return self._models.get(name)

    @property
    def models(self) -> tuple[FlatModel, ...]:
        """The distinct networks, the whole one first."""
        return tuple(self._models.values())

    def work(self, submodel: Submodel | None) -> float:
        """Floating-point work of training on an example, relative to the whole network."""
        return 1.0 if submodel is None else self.works[submodel.name]

    @cached_property
    def works(self) -> dict[str, float]:
        """`work` by name of the sub-model; the whole network has the empty name."""
        counts = {name: _operations(model) for name, model in self._models.items()}
        if not counts[""]:  # nothing but elementwise operations, which are not counted
            counts = {name: model.layout.size for name, model in self._models.items()}
        return {name: count / counts[""] for name, count in counts.items()}


def build_networks(
    name: str | nn.Module | Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: Sequence[int],
    widths: Sequence[float],
    objective: Objective | None = None,
    buffers: Buffers = "average",
    seed: int = 0,
    input_dtype: torch.dtype = torch.float32,
) -> Networks:
    """The model called `name` in these widths and in full width; see `flat_model`."""
    made = (objective, buffers, seed, input_dtype)
    whole = flat_model(name, input_shape, num_classes, hidden, 1.0, *made)
    narrower = {}
    for width in {float(width) for width in widths if width != 1}:
        try:
            narrower[width] = flat_model(name, input_shape, num_classes, hidden, width, *made)
        except BadInput as error:
            raise BadInput(f"at width {width:g}: {error}") from error
    return Networks(whole, narrower, label_of(name))


def _operations(model: FlatModel) -> int:
    """Floating-point operations of one forward pass; the backward pass is proportional."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.module.eval()(model.example(1))
    return int(counter.get_total_flops())

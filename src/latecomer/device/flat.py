"""A network as a function of one flat parameter vector."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from latecomer.core.params import Layout
from latecomer.device.checks import check_model
from latecomer.device.kernel import CompiledKernel
from latecomer.device.models import build_model
from latecomer.device.objective import Objective, classification
from latecomer.device.seeding import global_generator


class FlatModel:
    """A torch module and the layout of its parameters in a flat vector.

    `init` calls `build` anew, which gives the initial weights of the network's own definition.
    `head` is the slice of the vector that belongs to the output layer. `objective` has the loss;
    without one it is cross-entropy over `num_classes`. `kernel`, if set, trains the specs that it
    covers. The parameters of `module` are scratch space, so a FlatModel must not
    be used by two threads at once.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        input_shape: tuple[int, ...],
        num_classes: int,
        objective: Objective | None = None,
    ) -> None:
        self._build = build
        self.input_shape = input_shape
        self.num_classes = num_classes
        self.objective = objective or classification(num_classes)
        self.module = self._seeded(0)
        check_model(self.module, input_shape, num_classes, objective=self.objective)
        self.layout = Layout.of(self.module)
        self.head = _output_span(self.module, self.layout, input_shape)
        self._parameters = list(self.module.parameters())
        self.kernel: CompiledKernel | None = None

    def init(self, seed: int) -> Tensor:
        """The initial parameters of `seed`; the global generator is left unchanged."""
        return self.layout.flatten(dict(self._seeded(seed).named_parameters()))

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        """The logits of `x` at `params`; differentiable and vmappable in both arguments."""
        output: Tensor = torch.func.functional_call(self.module, self.layout.unflatten(params), x)
        return output

    def bind(self, vector: Tensor) -> list[nn.Parameter]:
        """Make the parameters of `module` views of `vector`, until the next call.

        Changing `vector` in place then changes the network, without a copy per step.
        """
        views = self.layout.unflatten(vector.detach()).values()
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view
        return self._parameters

    def _seeded(self, seed: int) -> nn.Module:
        with global_generator(seed):
            return self._build().train()


def flat_model(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: Sequence[int] = (64, 32),
    width: float = 1.0,
    objective: Objective | None = None,
) -> FlatModel:
    """The model called `name` (see `build_model`) as a function of one vector."""
    return FlatModel(
        partial(build_model, name, input_shape, num_classes, hidden, width, objective),
        input_shape,
        num_classes,
        objective,
    )


def _output_span(module: nn.Module, layout: Layout, input_shape: tuple[int, ...]) -> slice:
    """The slice of the parameters of the layer that is executed last."""
    finished: list[str] = []

    def note(name: str) -> Callable[[nn.Module, object, object], None]:
        return lambda _module, _input, _output: finished.append(name)

    owners = {name.rpartition(".")[0] for name in layout.names}
    handles = [
        part.register_forward_hook(note(name))
        for name, part in module.named_modules()
        if name in owners
    ]
    with torch.no_grad():
        module(torch.zeros(1, *input_shape))
    for handle in handles:
        handle.remove()
    last = finished[-1] if finished else layout.names[-1].rpartition(".")[0]
    spans = [layout.span(name) for name in layout.names if name.rpartition(".")[0] == last]
    return slice(spans[0].start, spans[-1].stop)

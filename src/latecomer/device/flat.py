"""A network as a function of one flat parameter vector."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from latecomer.core.params import Layout
from latecomer.device.checks import counters_of, examine, forward, set_buffer
from latecomer.device.kernel import CompiledKernel
from latecomer.device.models import build_model, label_of
from latecomer.device.objective import Objective, classification
from latecomer.device.seeding import global_generator

Buffers = Literal["average", "local"]
VARIANCE = "running_var"  # of normalisation layers: never below 0, whatever a merge computes


class FlatModel:
    """A torch module and the layout of what devices train and send, in a flat vector.

    The vector has the trainable parameters and then the float buffers that training changes, such
    as the running statistics of BatchNorm. With `buffers` = "local" these stay on the device:
    `layout` has the parameters only, and `whole` both. Frozen parameters and constant buffers are
    in `module` alone, with the values that `build` gives them for `seed`; they are never sent.

    `init` calls `build` anew, which gives the initial weights of the network's own definition.
    `head` is the slice of the vector that belongs to the output layer. `objective` has the loss;
    without one it is cross-entropy over `num_classes`. `kernel`, if set, trains the specs that it
    covers. The tensors of `module` are scratch space, so a FlatModel must not
    be used by two threads at once.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        input_shape: tuple[int, ...],
        num_classes: int,
        objective: Objective | None = None,
        buffers: Buffers = "average",
        seed: int = 0,
        input_dtype: torch.dtype = torch.float32,
        label: str = "model",
    ) -> None:
        self._build, self._label = build, label
        self.input_shape, self.input_dtype = input_shape, input_dtype
        self.num_classes = num_classes
        self.objective = objective or classification(num_classes)
        self.module = self._seeded(seed)
        with global_generator(0):
            two = self.example(2)
            batch = torch.randn(two.shape) if two.is_floating_point() else two
        self.traits = examine(self.module, batch, self.objective, label)
        self.whole = Layout.of(self.module, self.traits.buffers)
        self.layout = self.whole if buffers == "average" else Layout.of(self.module)
        self.head = _output_span(self.module, self.layout, two)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._norms = [part for part in self.module.modules() if isinstance(part, _NormBase)]
        self._counters = [(value, value.clone()) for _, _, value in counters_of(self.module)]
        self._initial = self._flattened(self.module)
        self.kernel: CompiledKernel | None = None
        self.device = torch.device("cpu")
        self.opaque = ""  # why the server cannot repeat the training of devices; empty if it can

    def to(self, device: torch.device) -> None:
        """Compute on this device. Parameter vectors, examples and outputs stay where they are."""
        self.device = device
        self.module.to(device)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._counters = [(value, value.clone()) for _, _, value in counters_of(self.module)]

    @property
    def keeps_buffers(self) -> bool:
        """Whether devices keep buffers of their own, which are not in the vector that is sent."""
        return self.layout.size < self.whole.size

    def example(self, n: int) -> Tensor:
        """n inputs of zeros."""
        return torch.zeros(n, *self.input_shape, dtype=self.input_dtype)

    def init(self, seed: int) -> Tensor:
        """The initial parameters of `seed`; the global generator is left unchanged."""
        return self._flattened(self._seeded(seed))[: self.layout.size].clone()

    def extended(self, params: Tensor, buffers: Tensor | None = None) -> Tensor:
        """`params` and the buffers that a device keeps (None: the initial ones) in one vector."""
        if not self.keeps_buffers or params.numel() == self.whole.size:
            return params
        kept = self._initial[self.layout.size :] if buffers is None else buffers
        return torch.cat([params, kept])

    def logits(self, params: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """The logits of `x` at `params`; differentiable and vmappable in both arguments.

        Without the buffers that devices keep, normalisation layers use the statistics of `x`.
        """
        self.set_mode(training)
        complete = params.numel() == self.whole.size
        vector = params if complete else self.extended(params)
        tensors = self.whole.unflatten(vector.to(self.device))
        if not complete and len(x) > 1:
            self._set_norms(training=True)
        for name in self.traits.buffers:  # copies: normalisation layers may change them
            buffer = tensors[name]
            tensors[name] = buffer.clamp(min=0.0) if name.endswith(VARIANCE) else buffer.clone()
        drawn = self.traits.random_in_use and not training
        with global_generator(0) if drawn else nullcontext():
            output: Tensor = torch.func.functional_call(self.module, tensors, x.to(self.device))
        if not complete:
            self._set_norms(training)
        return output.to(params.device)

    def bind(self, vector: Tensor, steps: int = 0) -> list[nn.Parameter]:
        """Make the trained tensors of `module` views of `vector`, until the next call.

        Changing `vector` in place then changes the network, without a copy per step. Counters of
        training steps are set to their initial values plus `steps`.
        """
        views = self.whole.unflatten(vector.detach())
        for parameter, view in zip(self._parameters, views.values(), strict=False):
            parameter.data = view
        for name in self.traits.buffers:
            if name.endswith(VARIANCE):
                views[name].clamp_(min=0.0)
            set_buffer(self.module, name, views[name])
        self.set_counters(steps)
        return self._parameters

    def set_counters(self, steps: int) -> None:
        """Set the counters of training steps to their initial values plus `steps`."""
        for counter, start in self._counters:
            counter.copy_(start + steps)

    def collect(self, vector: Tensor) -> None:
        """Copy to `vector` the buffers that forward passes replaced instead of changing them."""
        views = self.whole.unflatten(vector)
        for name in self.traits.buffers:
            views[name].copy_(self.module.get_buffer(name))

    def set_mode(self, training: bool, statistics: bool = True) -> None:
        """Training or evaluation mode; normalisation layers train only with `statistics`."""
        if self.module.training != training:
            self.module.train(training)
        if training and self._norms:
            self._set_norms(statistics)

    def _set_norms(self, training: bool) -> None:
        for norm in self._norms:
            norm.training = training

    def state_dict(self, params: Tensor) -> dict[str, Tensor]:
        """Copies of all tensors of the module at `params`, as `load_state_dict` takes them."""
        self.bind(self.extended(params).to(self.device, copy=True))
        named = self.module.state_dict().items()
        return {
            name: value.detach().to("cpu", copy=True)
            for name, value in named
            if isinstance(value, Tensor)
        }

    def copy_at(self, params: Tensor) -> nn.Module:
        """A copy of the module at `params`, in training mode and without gradients."""
        self.set_mode(training=True)
        self.bind(self.extended(params).to(self.device, copy=True))
        module = copy.deepcopy(self.module)
        module.zero_grad(set_to_none=True)
        return module

    def vector_of(self, module: nn.Module) -> Tensor:
        """The trained tensors of a copy of the module, as one vector."""
        return self._flattened(module).to(self._initial.device)

    def _seeded(self, seed: int) -> nn.Module:
        with global_generator(seed):
            module = self._build()
            if any(map(is_lazy, module.parameters())):
                # Sets the shapes of lazy layers.
                forward(module.eval(), self.example(2), self._label)
        if any(p.dtype != torch.float32 for p in module.parameters() if p.is_floating_point()):
            module.float()
        return module.train()

    def _flattened(self, module: nn.Module) -> Tensor:
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        return self.whole.flatten(named)


def flat_model(
    name: str | nn.Module | Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: Sequence[int] = (64, 32),
    width: float = 1.0,
    objective: Objective | None = None,
    buffers: Buffers = "average",
    seed: int = 0,
    input_dtype: torch.dtype = torch.float32,
) -> FlatModel:
    """The model called `name` (see `build_model`) as a function of one vector.

    `seed` gives the frozen parameters their values: server and devices need the same.
    """
    return FlatModel(
        partial(build_model, name, input_shape, num_classes, hidden, width),
        input_shape,
        num_classes,
        objective,
        buffers,
        seed,
        input_dtype,
        label_of(name),
    )


def _output_span(module: nn.Module, layout: Layout, batch: Tensor) -> slice:
    """The slice of the parameters of the layer that is executed last."""
    finished: list[str] = []

    def note(name: str) -> Callable[[nn.Module, object, object], None]:
        return lambda _module, _input, _output: finished.append(name)

    trained = layout.names[: len(layout.names) - layout.buffers]
    owners = {name.rpartition(".")[0] for name in trained}
    handles = [
        part.register_forward_hook(note(name))
        for name, part in module.named_modules()
        if name in owners
    ]
    with torch.no_grad(), global_generator():
        module.eval()(batch)
    for handle in handles:
        handle.remove()
    last = finished[-1] if finished else trained[-1].rpartition(".")[0]
    spans = [layout.span(name) for name in trained if name.rpartition(".")[0] == last]
    return slice(spans[0].start, spans[-1].stop)

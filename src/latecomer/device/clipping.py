"""Per-example gradients, clipped and summed in one backward pass.

For a linear or convolutional layer the gradient of one example is the product of its input and of
the gradient at its output: norms and the clipped sum follow from one ordinary backward pass
(Goodfellow 2015; Li et al. 2022 call it ghost clipping).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device.objective import Objective

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


class Product:
    """The gradient of a layer's weight for each example is back (n, o, t) times ahead (n, t, i)."""

    def __init__(self, layer: Layer, back: Tensor, ahead: Tensor) -> None:
        self.layer, self.back, self.ahead = layer, back, ahead
        # With one position, norms and sums need not form the product.
        self._each = back @ ahead if back.shape[2] > 1 else None

    def norms(self, order: int) -> Tensor:
        """Per example: the sum of absolute gradient values to the power `order`."""
        if self._each is not None:
            total = _power(self._each, order)
        else:
            total = _power(self.back, order) * _power(self.ahead, order)
        return total if self.layer.bias is None else total + _power(self.back.sum(2), order)

    def sums(self, factors: Tensor) -> list[Tensor]:
        """Sums over the examples, weighted by `factors`: of the weight, and of the bias if any."""
        if self._each is not None:
            weight = factors @ self._each.flatten(1)
        else:
            weight = (factors.unsqueeze(1) * self.back.squeeze(2)).T @ self.ahead.squeeze(1)
        return [weight] if self.layer.bias is None else [weight, factors @ self.back.sum(2)]


def _power(values: Tensor, order: int) -> Tensor:
    size = values.abs() if order == 1 else values.square()
    return size.flatten(1).sum(1)


def layers_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Layer] | None:
    """The layers that hold the parameters, in their order; None if some are of another kind."""
    found: list[Layer] = []
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d):
            plain = part.groups == 1 and set(part.dilation) == {1} and part.padding_mode == "zeros"
            if not plain or isinstance(part.padding, str):
                return None
            found.append(part)
        elif isinstance(part, nn.Linear):
            found.append(part)
    held = [p for layer in found for p in (layer.weight, layer.bias) if p is not None]
    same = len(held) == len(parameters) and all(
        a is b for a, b in zip(held, parameters, strict=True)
    )
    return found if same else None


def clipped_sum(
    module: nn.Module,
    objective: Objective,
    layers: Sequence[Layer],
    x: Tensor,
    y: Tensor,
    spec: TrainSpec,
) -> Tensor | None:
    """The sum of the examples' gradients, each scaled down to a norm of `spec.clip`, as a vector.

    None if a layer is run more than once, or on more than one vector per example.
    """
    passes: dict[Layer, tuple[Tensor, Tensor]] = {}
    versions: list[tuple[int, int]] = []
    times = 0

    def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal times
        times += 1
        passes[layer] = (inputs[0], output)  # type: ignore[index]
        versions.append((inputs[0]._version, output._version))

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with torch.enable_grad():
            loss = objective.sum(module(x), y)
    finally:
        for handle in handles:
            handle.remove()
    if times != len(layers) or len(passes) != len(layers):
        return None
    if versions != [(given._version, output._version) for given, output in passes.values()]:
        return None  # overwritten in place: the gradient is no longer that of the layer's output
    outputs = [passes[layer][1] for layer in layers]
    backs = torch.autograd.grad(loss, outputs, allow_unused=True)
    if any(back is None for back in backs):
        return None
    products: list[Product] = []
    for layer, back in zip(layers, backs, strict=True):
        ahead = _ahead(layer, passes[layer][0].detach())
        if ahead is None:
            return None
        products.append(
            Product(layer, back.flatten(2) if back.dim() > 2 else back.unsqueeze(2), ahead)
        )
    total = torch.stack([product.norms(spec.clip_norm) for product in products]).sum(0)
    norms = total if spec.clip_norm == 1 else total.sqrt()
    if not (usable := norms.isfinite()).all():
        # An overflow must not reach the sum: it would leave the device un-noised.
        return clipped_sum(module, objective, layers, x[usable], y[usable], spec)
    factors = (spec.clip / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
    pieces = [piece for product in products for piece in product.sums(factors)]
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _ahead(layer: Layer, given: Tensor) -> Tensor | None:
    """The layer's input as (n, positions, weights of one output)."""
    if isinstance(layer, nn.Linear):
        return given.unsqueeze(1) if given.dim() == 2 else None
    kernel, stride, padding = layer.kernel_size, layer.stride, layer.padding
    if isinstance(layer, nn.Conv1d):
        given = given.unsqueeze(2)
        kernel, stride, padding = (1, *kernel), (1, *stride), (0, *padding)
    return F.unfold(given, kernel, padding=padding, stride=stride).transpose(1, 2)  # type: ignore[arg-type]

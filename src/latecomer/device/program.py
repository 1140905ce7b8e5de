"""A sequential network as a table of layers, for the kernel that does not use autograd."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from latecomer.core.params import Layout
from latecomer.device.zoo import ChannelsFirst, Shape

LINEAR, CONV, RELU, MAXPOOL, AVGPOOL = range(5)
FIRST = 5  # a linear layer on the input itself, stored as (batch, features)
# Columns of the table.
KIND, IN_C, IN_H, IN_W, OUT_C, OUT_H, OUT_W, K_H, K_W, PAD_H, PAD_W, WEIGHT, BIAS = range(13)


KNOWN = (
    nn.Linear,
    nn.ReLU,
    nn.Conv1d,
    nn.Conv2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AdaptiveAvgPool1d,
)


@dataclass(frozen=True)
class Program:
    """`table` has a row per layer, `inputs` the input feature at each position."""

    table: NDArray[np.int64]
    inputs: NDArray[np.int64]

    @property
    def only_linear(self) -> bool:
        return bool(np.isin(self.table[:, KIND], (FIRST, LINEAR, RELU)).all())


def program_of(module: nn.Module, layout: Layout, input_shape: Shape) -> Program | None:
    """The table of `module`, or None if it has a layer that the kernel does not support.

    Types are compared exactly: a subclass may compute anything.
    """
    if type(module) is not nn.Sequential or _hooked(module):
        return None
    features = int(np.prod(input_shape))
    inputs = np.arange(features)
    # (channels, height, width); a series has height 1, flat features are channels.
    shape: Shape | None = {1: (input_shape[0], 1, 1), 3: input_shape}.get(len(input_shape))
    rows: list[list[int]] = []
    for position, (name, layer) in enumerate(module._modules.items()):
        if layer is None or _hooked(layer):
            return None
        if type(layer) is ChannelsFirst and position == 0:
            length, channels = input_shape if len(input_shape) == 2 else (features, 1)
            inputs = inputs.reshape(length, channels).T.reshape(-1)
            shape = (channels, 1, length)
        elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            shape = (features, 1, 1) if shape is None else (int(np.prod(shape)), 1, 1)
        elif shape is None:
            return None
        else:
            row = _row(layer, shape) if type(layer) in KNOWN else None
            if row is None:
                return None
            if row[KIND] in (LINEAR, CONV):
                if not {f"{name}.weight", f"{name}.bias"} <= set(layout.names):
                    return None  # frozen, or shared with another layer
                row += [layout.span(f"{name}.weight").start, layout.span(f"{name}.bias").start]
            else:
                row += [-1, -1]
            if row[KIND] == LINEAR and not rows:
                row[KIND] = FIRST
            rows.append(row)
            shape = (row[OUT_C], row[OUT_H], row[OUT_W])
    if not rows or rows[-1][KIND] not in (LINEAR, FIRST):
        return None
    return Program(np.array(rows, dtype=np.int64), inputs.astype(np.int64))


def _row(layer: nn.Module, shape: Shape) -> list[int] | None:
    """Kind, shapes and window of one layer; None if it is not supported."""
    channels, height, width = shape
    match layer:
        case nn.Linear(bias=bias, in_features=fan_in) if bias is not None and shape == (
            fan_in,
            1,
            1,
        ):
            return [LINEAR, *shape, layer.out_features, 1, 1, 1, 1, 0, 0]
        case nn.ReLU():
            return [RELU, *shape, *shape, 1, 1, 0, 0]
        case nn.Conv2d(padding=tuple(padding)) | nn.Conv1d(padding=tuple(padding)) if _plain(
            layer, channels
        ):
            (k_h, k_w), (p_h, p_w) = _pair(layer.kernel_size), _pair(padding, 0)
            out = (height + 2 * p_h - k_h + 1, width + 2 * p_w - k_w + 1)
            return [CONV, *shape, layer.out_channels, *out, k_h, k_w, p_h, p_w]
        case nn.MaxPool2d() | nn.MaxPool1d() if _plain_pool(layer):
            k_h, k_w = _pair(layer.kernel_size, 1, isinstance(layer, nn.MaxPool1d))
            rest = (k_h - 1, k_w - 1) if layer.ceil_mode else (0, 0)
            out = ((height + rest[0]) // k_h, (width + rest[1]) // k_w)
            return [MAXPOOL, *shape, channels, *out, k_h, k_w, 0, 0]
        case nn.AdaptiveAvgPool1d(output_size=int(segments)) if height == 1:
            return [AVGPOOL, *shape, channels, 1, segments, 1, 1, 0, 0]
    return None


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _plain(layer: nn.Conv1d | nn.Conv2d, channels: int) -> bool:
    ones = all(v == 1 for v in (*layer.stride, *layer.dilation, layer.groups))
    return (
        ones
        and layer.in_channels == channels
        and layer.padding_mode == "zeros"
        and layer.bias is not None
    )


def _plain_pool(layer: nn.MaxPool1d | nn.MaxPool2d) -> bool:
    return (
        layer.stride == layer.kernel_size
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.return_indices
    )


def _pair(value: int | tuple[int, ...], missing: int = 1, flat: bool = False) -> tuple[int, int]:
    """Height and width; a value for one axis is the width."""
    if isinstance(value, int):
        return (missing, value) if flat else (value, value)
    return (missing, value[0]) if len(value) == 1 else (value[0], value[1])

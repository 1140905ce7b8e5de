"""The built-in networks, stateless, deterministic and with a width factor for sub-models.

A network of width r has max(1, floor(r * d)) of every d hidden channels; its parameters are then
prefix slices of the full ones (flattening is channel-major), while inputs and classes stay whole.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, prod

import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]

MIN_LENET_SIDE = 4  # pixels; two poolings by two must leave one
LARGE_IMAGE = 64  # pixels; larger images get a strided stem
SEGMENTS = 16  # cnn1d: time steps after pooling, before the linear layers


def scaled(channels: int, width: float) -> int:
    """The number of channels that remain of `channels` at `width`."""
    return max(1, floor(width * channels + 1e-9))  # Eq. 10


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with as many groups as divide `channels` and keep eight channels or more."""
    groups = max(g for g in range(1, max(1, channels // 8) + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def mlp(shape: Shape, classes: int, hidden: Sequence[int], width: float) -> nn.Module:
    sizes = [prod(shape), *(scaled(size, width) for size in hidden)]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


class ChannelsFirst(nn.Module):
    """(n, T, C) -> (n, C, T); flat features (n, F) become one channel of length F."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 2 else x.transpose(1, 2)


def cnn1d(shape: Shape, classes: int, hidden: Sequence[int], width: float) -> nn.Module:
    length, channels = shape if len(shape) == 2 else (shape[0], 1)
    first, second, last = (scaled(size, width) for size in (32, 64, 64))
    # ceil_mode: pooling a series of one step leaves one step.
    pooled = ceil(length / 4)
    segments = min(SEGMENTS, pooled)
    return nn.Sequential(
        ChannelsFirst(),
        nn.Conv1d(channels, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2, ceil_mode=True),
        nn.Conv1d(first, second, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2, ceil_mode=True),
        nn.AdaptiveAvgPool1d(segments),
        nn.Flatten(),
        nn.Linear(second * segments, last),
        nn.ReLU(),
        nn.Linear(last, classes),
    )


def lenet(shape: Shape, classes: int, hidden: Sequence[int], width: float) -> nn.Module:
    """LeNet-5 with ReLU and max pooling; small images are padded so that pixels remain.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    channels, *sides = shape
    first, second, third, fourth = (scaled(size, width) for size in (6, 16, 120, 84))
    outer = 2 if min(sides) < 32 else 0
    halves = [(side + 2 * outer - 4) // 2 for side in sides]
    inner = 2 if min(halves) < 6 else 0
    quarters = [(half + 2 * inner - 4) // 2 for half in halves]
    return nn.Sequential(
        nn.Conv2d(channels, first, 5, padding=outer),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=inner),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * prod(quarters), third),
        nn.ReLU(),
        nn.Linear(third, fourth),
        nn.ReLU(),
        nn.Linear(fourth, classes),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.norm1 = group_norm(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = group_norm(fan_out)
        # By stride, not by channels, so that the layout is the same at every width.
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), group_norm(fan_out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def resnet18(shape: Shape, classes: int, hidden: Sequence[int], width: float) -> nn.Module:
    """ResNet-18 with GroupNorm; images up to 64 pixels get the 3x3 stem used for CIFAR.

    He et al., "Deep residual learning for image recognition", 2016.
    """
    sizes = [scaled(size, width) for size in (64, 64, 128, 256, 512)]
    if min(shape[1:]) > LARGE_IMAGE:
        stem = nn.Conv2d(shape[0], sizes[0], 7, stride=2, padding=3, bias=False)
        pool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
    else:
        stem = nn.Conv2d(shape[0], sizes[0], 3, padding=1, bias=False)
        pool = nn.Identity()
    layers: list[nn.Module] = [stem, group_norm(sizes[0]), nn.ReLU(), pool]
    for stage, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        layers += [
            ResidualBlock(fan_in, fan_out, stride=1 if stage == 0 else 2),
            ResidualBlock(fan_out, fan_out, stride=1),
        ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], classes)
    )

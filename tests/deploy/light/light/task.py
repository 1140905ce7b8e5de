"""The model and the data, of a few kilobytes."""

import torch
from torch import Tensor

from latecomer.device.flat import FlatModel, flat_model


def model(hidden: int) -> FlatModel:
    return flat_model("mlp", (8,), 2, (hidden,))


def part(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return x, (x[:, 0] > 0).long()

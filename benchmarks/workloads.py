"""The workloads of the speed notes, and a plain eager PyTorch loop to measure against."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model


@dataclass(frozen=True)
class Workload:
    """Devices with data of their own, a model and a local training program."""

    name: str
    model: str
    input_shape: tuple[int, ...]
    classes: int
    hidden: tuple[int, ...]
    examples: int
    spec: TrainSpec

    def flat_model(self) -> FlatModel:
        return flat_model(self.model, self.input_shape, self.classes, self.hidden)

    def data(self, devices: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [
            (
                torch.randn(self.examples, *self.input_shape, generator=generator),
                torch.randint(0, self.classes, (self.examples,), generator=generator),
            )
            for _ in range(devices)
        ]


SGD = {"lr": 0.01, "momentum": 0.9}
W1 = Workload("W1", "mlp", (561,), 6, (64, 16), 80, TrainSpec(local_epochs=2, batch_size=32, **SGD))
W2 = Workload(
    "W2", "lenet", (1, 28, 28), 10, (), 100, TrainSpec(local_epochs=1, batch_size=20, **SGD)
)


def eager_update(
    module: nn.Module, data: list[tuple[Tensor, Tensor]], spec: TrainSpec
) -> Callable[[int], None]:
    """One client update as anyone would write it: autograd and torch.optim."""

    def update(i: int) -> None:
        x, y = data[i % len(data)]
        optimizer = torch.optim.SGD(module.parameters(), spec.lr, spec.momentum)
        for _ in range(spec.local_epochs):
            for batch in torch.randperm(len(y)).split(spec.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()

    return update

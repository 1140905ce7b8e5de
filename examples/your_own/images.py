"""A ResNet with BatchNorm on images: `python images.py cifar10.npz`, or without a file."""

import sys

import numpy as np
from torch import Tensor, nn

import latecomer


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(inner)) + self.shortcut(x)).relu()


def resnet(width: int = 16) -> nn.Module:
    blocks = [Block(3, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def made_up(count: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Not CIFAR-10: noisy copies of one random image for each of ten classes."""
    print("no file given: made-up images, not CIFAR-10")
    rng, y = np.random.default_rng(1), np.arange(count) % 10
    classes = np.kron(rng.random((10, 3, 2, 2)), np.ones((16, 16)))
    return (classes[y] + 0.3 * rng.normal(size=(count, 3, 32, 32))).astype("float32"), y


def main(path: str = "", updates: int = 400, out: str = "runs/images") -> latecomer.Result:
    source = {"source": "npz", "path": path, "test": "official"} if path else {}
    config = {
        "data": {**source, "partition": "dirichlet", "alpha": 1.0},
        "fleet": {"devices": 10, "profile": "tiers"},  # fast and slow devices
        "training": {"lr": 0.05, "momentum": 0.9, "batch_size": 16},
        "stop": {"updates": updates},
    }
    return latecomer.run(config, out, model=resnet, data=None if path else made_up())


if __name__ == "__main__":
    print(main(*sys.argv[1:2]).metrics[["updates", "loss", "accuracy"]])

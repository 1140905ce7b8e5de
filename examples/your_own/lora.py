"""LoRA fine-tuning: devices train and send matrices of low rank beside a frozen network."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import latecomer


class Lora(nn.Module):
    """A frozen linear layer plus a trained matrix of rank `rank`."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def pretrained(x: Tensor, y: Tensor, width: int, steps: int = 100) -> nn.Sequential:
    """A network of three layers, trained on one machine."""
    torch.manual_seed(1)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.Adam(net.parameters(), 0.3 / width)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def main(updates=400, out="runs/lora", strategy="latecomer", rank=4, width=128):
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(digits)
    net = pretrained(x[:900], y[:900], width)
    if rank:  # 0: all parameters are trained
        net = nn.Sequential(*(Lora(p, rank) if isinstance(p, nn.Linear) else p for p in net))
    mirrored = x[900:].reshape(-1, 8, 8).flip(2).reshape(-1, 64)  # what the devices have
    config = {
        "data": {"scale": "none", "partition": "dirichlet", "alpha": 0.5},
        "fleet": {"devices": 20, "profile": "tiers"},
        "training": {"optimizer": "adam", "lr": 0.03},
        "stop": {"updates": updates},
    }
    return latecomer.run(config, out, strategy, model=net, data=(mirrored, y[900:]))


if __name__ == "__main__":
    result = main()
    print(result.metrics[["updates", "loss", "accuracy"]], result.summary["bytes"])

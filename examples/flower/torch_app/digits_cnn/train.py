"""Training and testing of the network."""

import torch
from torch import nn
from torch.utils.data import DataLoader


def train(
    net: nn.Module, loader: DataLoader, epochs: int, lr: float, device: torch.device
) -> float:
    """Train `net` in place with Adam; returns the mean loss of a batch."""
    net.to(device).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Mean loss and accuracy."""
    net.to(device).eval()
    loss, right = 0.0, 0
    for x, y in loader:
        outputs = net(x.to(device))
        loss += nn.functional.cross_entropy(outputs, y.to(device), reduction="sum").item()
        right += int((outputs.argmax(1) == y.to(device)).sum())
    examples = len(loader.dataset)
    return loss / examples, right / examples

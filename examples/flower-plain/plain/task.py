"""The model, the data and the training, in plain PyTorch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """64 pixels in, 10 digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def digits() -> TensorDataset:
    found = load_digits()
    x = torch.as_tensor(found.data / 16, dtype=torch.float32)
    return TensorDataset(x, torch.as_tensor(found.target))


def load_data(partition: int, partitions: int) -> DataLoader:
    x, y = digits().tensors
    kept = [i for i in range(len(y)) if i % 5 != 4][partition::partitions]
    return DataLoader(TensorDataset(x[kept], y[kept]), batch_size=16, shuffle=True)


def test_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Every fifth digit, which no device has."""
    x, y = digits().tensors
    return x[4::5], y[4::5]


def train(net: Net, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train `net` in place; returns the mean loss."""
    optimiser = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.5)
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / (epochs * len(loader))

"""Handwritten digits, split over the nodes by a Dirichlet distribution over classes."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    x = torch.as_tensor(found.images / 16, dtype=torch.float32).unsqueeze(1)
    return x, torch.as_tensor(found.target)


@cache
def partitions(num_partitions: int, alpha: float) -> tuple[np.ndarray, ...]:
    """The rows of every node; every fifth row belongs to the central test set."""
    rng = np.random.default_rng(0)
    labels = digits()[1].numpy()
    rows = np.array([row for row in range(len(labels)) if row % 5 != 4])
    parts: list[list[int]] = [[] for _ in range(num_partitions)]
    for label in range(10):
        of_class = rng.permutation(rows[labels[rows] == label])
        shares = rng.dirichlet([alpha] * num_partitions)
        cuts = (np.cumsum(shares)[:-1] * len(of_class)).astype(int)
        for part, chosen in zip(parts, np.split(of_class, cuts), strict=True):
            part.extend(chosen.tolist())
    # BatchNorm needs more than one example in a batch, so every node gets a few of every class.
    for number, part in enumerate(parts):
        if len(part) < 20:
            part.extend(rng.permutation(rows)[: 20 + number].tolist())
    return tuple(rng.permutation(part) for part in parts)


def load_data(
    partition_id: int, num_partitions: int, batch_size: int, alpha: float
) -> tuple[DataLoader, DataLoader]:
    """The training and the test examples of one node, 4 to 1."""
    x, y = digits()
    rows = torch.as_tensor(partitions(num_partitions, alpha)[partition_id])
    held = len(rows) // 5
    train, test = rows[held:], rows[:held]
    last = len(train) % batch_size == 1  # BatchNorm cannot train on a batch of one
    loader = DataLoader(
        TensorDataset(x[train], y[train]), batch_size=batch_size, shuffle=True, drop_last=last
    )
    return loader, DataLoader(TensorDataset(x[test], y[test]), batch_size=256)


def central_test() -> DataLoader:
    x, y = digits()
    return DataLoader(TensorDataset(x[4::5], y[4::5]), batch_size=512)

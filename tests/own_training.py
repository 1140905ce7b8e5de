"""A user's own training code, as `module:callable`."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from latecomer.device.own_training import TrainContext


def train(model: nn.Module, dataset: torch.utils.data.Dataset, context: TrainContext):
    """SGD with label smoothing, and noise from every global generator."""
    assert len(dataset)
    assert context.config == {} or context.config["seed"] == 1
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], context.lr)
    noise = 1e-3 * (random.random() + np.random.rand() + torch.rand(1, generator=context.generator))
    total = 0.0
    for _ in range(context.local_epochs):
        for x, y in DataLoader(
            dataset, context.batch_size, shuffle=True, drop_last=len(dataset) > 1
        ):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x + noise), y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            total = loss.item()
    return {"num_examples": len(dataset), "last_loss": total}


def nothing(model: nn.Module, dataset: torch.utils.data.Dataset, context: TrainContext) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.001)


def text(model, dataset, context):
    return "done"


def not_a_number(model, dataset, context):
    return {"loss": float("nan")}


def none_used(model, dataset, context):
    return 0


def lion(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.3, nesterov=True)


def no_optimizer(parameters, lr):
    return 3


def halved(version: int) -> float:
    return 0.5 ** (version // 5)


def unknown_used(model, dataset, context):
    return {"num_examples": float("nan")}


def two_arguments(model, dataset):
    return None

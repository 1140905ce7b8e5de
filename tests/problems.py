"""Small problems with targets of every kind, and losses and networks for them."""

import torch
import torch.nn.functional as F
from torch import nn

from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.objective import make_objective

NAN = float("nan")
KINDS = ("classes", "number", "numbers", "multi-label", "tokens", "own")


def inputs(n=40):
    rng = torch.Generator().manual_seed(3)
    return torch.randn(n, 5, generator=rng), torch.randn(5, 3, generator=rng)


class Tokens(nn.Module):
    """Predicts each of T tokens from the inputs of the same place."""

    def __init__(self, vocabulary=4):
        super().__init__()
        self.out = nn.Linear(2, vocabulary)

    def forward(self, x):
        return self.out(torch.stack([x, x.square()], dim=-1))


def a_problem(kind):
    """A network, its objective within, and examples of it."""
    x, w = inputs()
    match kind:
        case "classes":
            return flat_model("mlp", (5,), 3, (8,)), x, (x @ w).argmax(1)
        case "number":
            objective = make_objective("mse", 1)
            return flat_model("mlp", (5,), 1, (8,), objective=objective), x, (x @ w)[:, 0]
        case "numbers":
            y = x @ w
            y[::3, 1] = NAN
            objective = make_objective("mae", 3, (3,))
            return flat_model("mlp", (5,), 3, (8,), objective=objective), x, y
        case "multi-label":
            y = (x @ w > 0).float()
            y[::4, 2] = NAN
            y[5] = NAN  # nothing is known of it
            objective = make_objective("binary-cross-entropy", 3, (3,))
            return flat_model("mlp", (5,), 3, (8,), objective=objective), x, y
        case "tokens":
            y = (x > 0).long() + 2 * (x.abs() > 1).long()
            y[::5, 4] = -100
            return FlatModel(Tokens, (5,), 4, make_objective("cross-entropy", 4, (5,))), x, y
        case "own":
            objective = make_objective(huber, 3, (3,))
            return flat_model("mlp", (5,), 3, (8,), objective=objective), x, x @ w
    raise AssertionError(kind)


def huber(outputs, targets):
    return F.huber_loss(outputs, targets, reduction="none").mean(1)


def mean_huber(outputs, targets):
    return F.huber_loss(outputs, targets)


def one_huber(outputs, targets):
    return F.huber_loss(outputs.reshape(targets.shape), targets, reduction="none")


def loss(outputs, targets):
    return 0.0


def nan_loss(outputs, targets):
    return (outputs * NAN).mean()


def largest_error(outputs, targets):
    return (outputs - targets).abs().max()


def broken_metric(outputs, targets):
    raise ZeroDivisionError("no examples")

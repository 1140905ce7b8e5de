"""A recurrent network that predicts whether a broadcast of a cluster's model pays now.

Li et al. 2024 (EchoPFL), section 5.2.1: the network, with two hidden layers of 128 units, reads the
last changes of a cluster's model as L1 distances. It is trained beforehand on recorded inputs
(benchmarks/broadcasts.py writes the weights that come with the package) and trained further during
a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from latecomer.core.codec import portable
from latecomer.device.seeding import global_generator

WEIGHTS = Path(__file__).with_name("broadcast_predictor.safetensors")
HIDDEN, LAYERS = 128, 2
LEARNING_RATE = 0.01  # of the training steps during a run


class BroadcastClassifier(nn.Module):
    """Two logits, no broadcast (0) and broadcast (1), from a sequence of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.RNN(2, HIDDEN, LAYERS, batch_first=True)
        self.out = nn.Linear(HIDDEN, 2)

    def forward(self, features: Tensor) -> Tensor:
        read, _ = self.reader(features)
        logits: Tensor = self.out(read[:, -1])
        return logits


def broadcast_features(changes: Sequence[float], accumulated: float, length: int) -> Tensor:
    """The input: the last `length` changes, each beside the change since the last broadcast.

    All are in units of the mean change, so that the size of the model does not matter. The paper
    has the changes alone; but the rule to be learned (Eq. 4) compares them with the change since
    the last broadcast.
    """
    last = list(changes)[-length:]
    unit = (sum(last) / len(last) if last else 0.0) or 1.0
    rows = [[0.0, 0.0]] * (length - len(last)) + [[c / unit, accumulated / unit] for c in last]
    return torch.tensor(rows)


@cache
def pretrained_weights() -> dict[str, Tensor]:
    return load_file(WEIGHTS)


@portable
@dataclass(eq=False)
class Predictor:
    """The network of one cluster, which starts with a copy of the given or pretrained weights."""

    weights: dict[str, Tensor] = field(default_factory=pretrained_weights)

    def __post_init__(self) -> None:
        # Its random initial weights are replaced below: they must not advance other random streams.
        with global_generator():
            self.network = BroadcastClassifier()
        self.network.load_state_dict(self.weights)
        self.weights = dict(self.network.state_dict())  # they follow the training

    @torch.no_grad()
    def probability(self, features: Tensor) -> float:
        """The predicted probability that a broadcast pays."""
        return float(self.network(features.unsqueeze(0)).softmax(1)[0, 1])

    def train(self, features: Sequence[Tensor], labels: Sequence[int]) -> None:
        """One step of gradient descent on the cross-entropy of these labels."""
        logits = self.network(torch.stack(list(features)))
        loss = F.cross_entropy(logits, torch.tensor(list(labels)))
        parameters = list(self.network.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=LEARNING_RATE)


def mean_predictor(one: Predictor, other: Predictor) -> Predictor:
    """The predictor of a merged cluster: the mean of both networks' weights."""
    theirs = other.weights
    return Predictor({name: (value + theirs[name]) / 2 for name, value in one.weights.items()})

"""Whether a broadcast pays now, learned from how models have changed.

Li et al. 2024 (EchoPFL), section 5.2.1: a recurrent network of two hidden layers of 128 reads the
last changes of a cluster's model, as L1 distances. It is trained beforehand on recorded states
(benchmarks/broadcasts.py writes the weights that come with the package) and goes on learning.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from latecomer.device.seeding import global_generator

WEIGHTS = Path(__file__).with_name("broadcast_predictor.safetensors")
HIDDEN, LAYERS = 128, 2
RATE = 0.01  # of learning while it is used


class ChangeReader(nn.Module):
    """Reads changes one by one; says whether to broadcast (1) or not (0)."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.RNN(2, HIDDEN, LAYERS, batch_first=True)
        self.out = nn.Linear(HIDDEN, 2)

    def forward(self, states: Tensor) -> Tensor:
        read, _ = self.reader(states)
        logits: Tensor = self.out(read[:, -1])
        return logits


def state_of(changes: Sequence[float], gathered: float, length: int) -> Tensor:
    """What the network reads: the last changes, and beside each what has gathered so far.

    All are in units of the mean change, so that models of any size look alike. The paper names the
    changes alone; but the rule it is to learn (Eq. 4) compares them with what has gathered.
    """
    last = list(changes)[-length:]
    unit = (sum(last) / len(last) if last else 0.0) or 1.0
    rows = [[0.0, 0.0]] * (length - len(last)) + [[c / unit, gathered / unit] for c in last]
    return torch.tensor(rows)


class Predictor:
    """A reader of one cluster; begins with the weights of the package or of another one."""

    def __init__(self, weights: Mapping[str, Tensor] | None = None) -> None:
        # Its initial weights are replaced at once: they must not move anybody's random stream.
        with global_generator():
            self.network = ChangeReader()
        self.network.load_state_dict(dict(weights or trained_weights()))

    @torch.no_grad()
    def chance(self, state: Tensor) -> float:
        """The probability that a broadcast pays."""
        return float(self.network(state.unsqueeze(0)).softmax(1)[0, 1])

    def learn(self, states: Sequence[Tensor], truths: Sequence[int]) -> None:
        """One step on what turned out to be true."""
        loss = F.cross_entropy(self.network(torch.stack(list(states))), torch.tensor(list(truths)))
        parameters = list(self.network.parameters())
        slopes = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.sub_(slope, alpha=RATE)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}


def averaged(one: Predictor, other: Predictor) -> Predictor:
    """What two clusters that become one go on with."""
    theirs = other.weights()
    return Predictor({name: (value + theirs[name]) / 2 for name, value in one.weights().items()})


@cache
def trained_weights() -> dict[str, Tensor]:
    return load_file(WEIGHTS)

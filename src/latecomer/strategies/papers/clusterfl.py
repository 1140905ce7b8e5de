"""Ouyang et al., ClusterFL: A Similarity-Aware Federated Learning System for HAR, 2021.

Synchronous rounds in which every device has a model of its own: a mix of all models, the more of
one the more alike its outputs are. Written from the authors' public code, where the server holds
some data to compare outputs on and couples the models by ADMM; see docs/papers.md for what we do.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Assignment, Commit, ServerView, Strategy
from latecomer.core.submodel import covered
from latecomer.strategies.options import Count, Positive
from latecomer.strategies.parts.rounds import AtRoundStart, Rounds
from latecomer.strategies.recipe import recipe


@runtime_checkable
class Computes(Protocol):
    """A network that the server can run."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...
    def logits(self, params: Tensor, x: Tensor) -> Tensor: ...


class ByOutputs:
    """What a round makes: everybody's own model, mixed from all by the likeness of outputs.

    Outputs are compared on `probes` standard normal inputs, because the server has no data.
    """

    def __init__(self, temperature: float, probes: int) -> None:
        self.temperature, self.probes = temperature, probes

    def __call__(self, contributions: Sequence[Contribution], view: ServerView) -> Iterable[Commit]:
        trained = [_whole(c, view) for c in contributions]
        shares = mixing(self.divergences(trained, view))
        if all(c.task.submodel is None for c in contributions):
            mixed = shares.T @ torch.stack(trained)
            yield from (
                Commit(c.lineage, own, 1) for c, own in zip(contributions, mixed, strict=True)
            )
            return
        for j, own in enumerate(contributions):
            head = view.store.head_params(own.lineage)
            total, share = torch.zeros_like(head), torch.zeros_like(head)
            for i, other in enumerate(contributions):
                index, weight = covered(other.task.submodel), shares[i, j].item()
                total[index] += weight * (trained[i] - head)[index]
                share[index] += weight
            yield Commit(own.lineage, torch.where(share > 0, head + total / share, head), 1)

    def divergences(self, models: Sequence[Tensor], view: ServerView) -> Tensor:
        """KL_ij between the softened outputs of models i and j, averaged over the probes."""
        network = view.network(None)
        if not isinstance(network, Computes):
            return torch.zeros(len(models), len(models))
        stream = torch.Generator().manual_seed(view.seed)
        x = torch.randn(self.probes, *network.input_shape, generator=stream)
        with torch.no_grad():
            logs = torch.stack(
                [F.log_softmax(network.logits(m, x) / self.temperature, 1) for m in models]
            ).flatten(1)
        chances = logs.exp()
        return ((chances * logs).sum(1, keepdim=True) - chances @ logs.T) / self.probes


def mixing(divergences: Tensor) -> Tensor:
    """F: how much of model i (row) goes into model j (column); every column sums to 1.

    P = max(0, K K^T) of the divergences K, centred by the mean row; a column is divided by its
    sum. Where all are alike, everybody gets the same share. (server_update_F of the public code.)
    """
    centred = divergences - divergences.mean(0, keepdim=True)
    likeness = (centred @ centred.T).clamp_min(0.0)
    sums = likeness.sum(0, keepdim=True)
    return torch.where(sums > 0, likeness / sums, 1.0 / len(divergences))


def _whole(contribution: Contribution, view: ServerView) -> Tensor:
    """The trained model in the coordinates of the whole one."""
    whole = view.store.head_params(contribution.lineage).clone()
    whole[covered(contribution.task.submodel)] = contribution.base + contribution.delta
    return whole


def _own_model(device: int, view: ServerView) -> Assignment:
    return Assignment(device, f"device-{device}")


@recipe(
    "clusterfl",
    "rounds in which each device's model is mixed from those with like outputs",
    "Ouyang et al. 2021",
)
def clusterfl(temperature: Positive = 6.0, probes: Count = 64) -> Strategy:
    """`temperature` softens the outputs that are compared."""
    return Strategy(
        name="clusterfl",
        merge=Rounds(ByOutputs(temperature, probes)),
        dispatch=AtRoundStart(_own_model),
        personal=True,
    )

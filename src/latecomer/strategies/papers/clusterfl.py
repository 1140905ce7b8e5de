"""Ouyang et al., ClusterFL: A Similarity-Aware Federated Learning System for HAR, 2021.

Synchronous rounds in which every device has its own model. After a round, the model of device j is
the sum over i of F[i, j] w_i, where F grows with the similarity of the models' outputs (`mixing`).
Written from the authors' public code, where the server holds data to compare outputs on and couples
the models by ADMM; docs/papers.md has the differences.
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
class RunnableNetwork(Protocol):
    """A network whose outputs the server can compute."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...
    def logits(self, params: Tensor, x: Tensor) -> Tensor: ...


class OutputSimilarity:
    """Merge of a round: every device's model becomes a mix of all, weighted by output similarity.

    Outputs at `temperature` are compared on `inputs` standard normal inputs, because the server has
    no data.
    """

    def __init__(self, temperature: float, inputs: int) -> None:
        self.temperature, self.inputs = temperature, inputs

    def __call__(self, contributions: Sequence[Contribution], view: ServerView) -> Iterable[Commit]:
        trained = [_whole(c, view) for c in contributions]
        shares = mixing(self.divergences(trained, view))
        if all(c.task.submodel is None for c in contributions):
            mixed = shares.T @ torch.stack(trained)
            yield from (
                Commit(c.lineage, params, 1) for c, params in zip(contributions, mixed, strict=True)
            )
            return
        for j, contribution in enumerate(contributions):
            head = view.store.head_params(contribution.lineage)
            total, share = torch.zeros_like(head), torch.zeros_like(head)
            for i, other in enumerate(contributions):
                index, weight = covered(other.task.submodel), shares[i, j].item()
                total[index] += weight * (trained[i] - head)[index]
                share[index] += weight
            params = torch.where(share > 0, head + total / share, head)
            yield Commit(contribution.lineage, params, 1)

    def divergences(self, models: Sequence[Tensor], view: ServerView) -> Tensor:
        """KL_ij between the softened outputs of models i and j, averaged over the inputs."""
        network = view.network(None)
        if not isinstance(network, RunnableNetwork):
            return torch.zeros(len(models), len(models))
        stream = torch.Generator().manual_seed(view.seed)
        x = torch.randn(self.inputs, *network.input_shape, generator=stream)
        with torch.no_grad():
            logs = torch.stack(
                [F.log_softmax(network.logits(m, x) / self.temperature, 1) for m in models]
            ).flatten(1)
        probabilities = logs.exp()
        return ((probabilities * logs).sum(1, keepdim=True) - probabilities @ logs.T) / self.inputs


def mixing(divergences: Tensor) -> Tensor:
    """F: the share of model i (row) in model j (column); every column sums to 1.

    P = max(0, K K^T) of the divergences K, centred by the mean row; a column is divided by its
    sum. Equal models get equal shares. (server_update_F of the public code.)
    """
    centred = divergences - divergences.mean(0, keepdim=True)
    similarity = (centred @ centred.T).clamp_min(0.0)
    sums = similarity.sum(0, keepdim=True)
    return torch.where(sums > 0, similarity / sums, 1.0 / len(divergences))


def _whole(contribution: Contribution, view: ServerView) -> Tensor:
    """The trained model, with the head where the device's sub-model does not reach."""
    whole = view.store.head_params(contribution.lineage).clone()
    whole[covered(contribution.task.submodel)] = contribution.base + contribution.delta
    return whole


def _device_lineage(device: int, view: ServerView) -> Assignment:
    return Assignment(device, f"device-{device}")


@recipe(
    "clusterfl",
    "synchronous rounds, each device's model a mix of those with similar outputs",
    "Ouyang et al. 2021",
)
def clusterfl(temperature: Positive = 6.0, inputs: Count = 64) -> Strategy:
    """Options:

    temperature: divides the logits before they are compared; higher values weaken differences.
    inputs: number of random inputs on which outputs are compared.
    """
    return Strategy(
        name="clusterfl",
        merge=Rounds(OutputSimilarity(temperature, inputs)),
        dispatch=AtRoundStart(_device_lineage),
        personal=True,
        needs_classes=True,
    )

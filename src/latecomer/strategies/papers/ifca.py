"""Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning, 2020.

Synchronous rounds with k cluster models: every device is sent all k models and trains the one with
the least loss on its data; each model becomes the average of the devices that trained it (IFCA,
Algorithm 1 with model averaging).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution
from latecomer.core.strategy import Assignment, Commit, ServerView, Strategy
from latecomer.strategies.options import Count
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.rounds import AtRoundStart, Rounds
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


@runtime_checkable
class InitialisableNetwork(Protocol):
    """A network whose parameters can be initialised from a seed."""

    def init(self, seed: int) -> Tensor: ...


class ClusterModels(Rounds):
    """Merge: `count` models, each initialised from its own seed, averaged every round."""

    def __init__(self, count: int) -> None:
        super().__init__(cluster_averages)
        self.names = (MAIN, *(f"cluster-{number}" for number in range(1, count)))

    def settle(self, view: ServerView) -> Iterable[Commit]:
        missing = [name for name in self.names if name not in view.store]
        if missing:
            return [Commit(name, self._start(name, view), 0) for name in missing]
        return super().settle(view)

    def _start(self, name: str, view: ServerView) -> Tensor:
        network, number = view.network(None), self.names.index(name)
        if isinstance(network, InitialisableNetwork):
            return network.init(view.seed + number)
        head = view.store.head_params()
        stream = torch.Generator().manual_seed(view.seed + number)
        return head + 0.1 * torch.randn(head.shape, generator=stream)

    def assign(self, device: int, view: ServerView) -> Assignment:
        return Assignment(device, self.names[0], offers=self.names[1:])


def cluster_averages(contributions: Sequence[Contribution], view: ServerView) -> Iterable[Commit]:
    """The new head of each model that at least one device trained: theta_j, line 10."""
    for lineage in view.store.lineages:
        members = [c for c in contributions if c.lineage == lineage]
        if members:
            head = view.store.head_params(lineage)
            yield Commit(lineage, moved(head, members, mean=True, step=1.0), len(members))


@recipe(
    "ifca",
    "synchronous rounds with k models, each device trains the one with the least loss",
    "Ghosh et al. 2020",
)
def ifca(clusters: Count = 2) -> Strategy:
    """Options:

    clusters: k, the number of models; a device downloads all of them for every task.
    """
    models = ClusterModels(clusters)
    return Strategy(
        name="ifca",
        weigh=by_examples(),
        merge=models,
        dispatch=AtRoundStart(models.assign),
        personal=True,
        needs="which model fits their data best",
    )

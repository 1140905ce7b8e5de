"""Wang et al., AsyncFedED: Asynchronous Federated Learning with Euclidean Distance based Adaptive
Weight Aggregation, 2022.

Staleness is how far the model has moved since, measured in lengths of the update:
gamma = |x_t - x_(t - tau)| / |delta|. Every update is added as it arrives, x <- x + eta delta with
eta = lambda / (gamma + eps). Whoever is staler than gamma_bar trains less next time, and more if
it is fresher: K <- K + [(gamma_bar - gamma) kappa].
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from latecomer.core.messages import Contribution
from latecomer.core.strategy import (
    Assignment,
    Commit,
    ImmediateDispatch,
    ServerView,
    Strategy,
    Weigh,
)
from latecomer.core.submodel import take
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.recipe import recipe


def moved_since(contribution: Contribution, view: ServerView) -> float:
    """gamma, on the coordinates that the device trained; 0 if the delta is 0."""
    head = take(view.store.head_params(contribution.lineage), contribution.task.submodel)
    length = torch.linalg.vector_norm(contribution.delta).item()
    return torch.dist(head, contribution.base).item() / length if length else 0.0


def by_distance(lam: float, eps: float) -> Weigh:
    """eta = lam / (gamma + eps)."""

    def weigh(contribution: Contribution, view: ServerView) -> float:
        return lam / (moved_since(contribution, view) + eps)

    return weigh


class LocalEpochs:
    """Merge: each contribution at once; and dispatch by its method of that name.

    The number of local epochs K of each device follows its gamma. It starts with the run's, is
    rounded to the nearest whole number, and stays between 1 and `most`.
    """

    def __init__(
        self, gamma_bar: float, kappa: float, most: int, dispatch: ImmediateDispatch
    ) -> None:
        self.gamma_bar, self.kappa, self.most = gamma_bar, kappa, most
        self.at_once, self.buffer = dispatch, Buffer(1)
        self._epochs: dict[int, int] = {}

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        change = round((self.gamma_bar - moved_since(contribution, view)) * self.kappa)
        epochs = contribution.task.spec.local_epochs + change
        self._epochs[contribution.task.device] = max(1, min(self.most, epochs))
        return self.buffer.add(contribution, view)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def dispatch(self, view: ServerView) -> Iterable[Assignment]:
        for wish in self.at_once(view):
            epochs = self._epochs.get(wish.device, view.spec.local_epochs)
            yield wish._replace(spec=replace(view.spec, local_epochs=epochs))

    def state(self) -> dict[str, Any]:
        return {"epochs": dict(self._epochs)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._epochs = dict(state["epochs"])


@recipe("asyncfeded", "add every update, less the further the model has moved", "Wang et al. 2022")
def asyncfeded(
    lam: Positive = 0.3,
    eps: Positive = 1.0,
    gamma_bar: NotNegative = 3.0,
    kappa: NotNegative = 0.0,
    max_epochs: Count = 10,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """A fresh update counts `lam` / `eps`; with `kappa` 0 everybody trains as the config says."""
    weigh, at_once = by_distance(lam, eps), ImmediateDispatch(concurrency)
    if not kappa:
        return Strategy(name="asyncfeded", weigh=weigh, merge=Buffer(1), dispatch=at_once)
    paced = LocalEpochs(gamma_bar, kappa, max_epochs, at_once)
    return Strategy(name="asyncfeded", weigh=weigh, merge=paced, dispatch=paced.dispatch)

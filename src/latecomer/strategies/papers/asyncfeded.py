"""Wang et al., AsyncFedED: Asynchronous Federated Learning with Euclidean Distance based Adaptive
Weight Aggregation, 2022.

Staleness is the distance that the model has moved since the base, in lengths of the update:
gamma = |x_t - x_(t - tau)| / |delta|. Every update is added on arrival, x <- x + eta delta with
eta = lambda / (gamma + eps). The number of local epochs of each device follows its gamma:
K <- K + round((gamma_bar - gamma) kappa).
"""

from collections.abc import Iterable
from dataclasses import replace

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


def relative_distance(contribution: Contribution, view: ServerView) -> float:
    """gamma, on the coordinates that the device trained; 0 if the delta is 0."""
    head = take(view.store.head_params(contribution.lineage), contribution.task.submodel)
    length = torch.linalg.vector_norm(contribution.delta).item()
    return torch.dist(head, contribution.base).item() / length if length else 0.0


def by_distance(lam: float, eps: float) -> Weigh:
    """eta = lam / (gamma + eps)."""

    def weigh(contribution: Contribution, view: ServerView) -> float:
        return lam / (relative_distance(contribution, view) + eps)

    return weigh


class AdaptiveLocalEpochs(Buffer):
    """Merge: every contribution on arrival; `dispatch` sets each device's local epochs.

    K starts with the run's number of local epochs, follows the device's gamma, and stays between 1
    and `max_epochs`.
    """

    kept = (*Buffer.kept, "_epochs")

    def __init__(
        self, gamma_bar: float, kappa: float, max_epochs: int, immediate: ImmediateDispatch
    ) -> None:
        super().__init__(1)
        self.gamma_bar, self.kappa, self.max_epochs = gamma_bar, kappa, max_epochs
        self.immediate = immediate
        self._epochs: dict[int, int] = {}  # device -> K

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        change = round((self.gamma_bar - relative_distance(contribution, view)) * self.kappa)
        epochs = contribution.task.spec.local_epochs + change
        self._epochs[contribution.task.device] = max(1, min(self.max_epochs, epochs))
        return super().add(contribution, view)

    def dispatch(self, view: ServerView) -> Iterable[Assignment]:
        for request in self.immediate(view):
            epochs = self._epochs.get(request.device, view.spec.local_epochs)
            yield request._replace(spec=replace(view.spec, local_epochs=epochs))


@recipe(
    "asyncfeded",
    "add every update, with less weight the further the model has moved",
    "Wang et al. 2022",
)
def asyncfeded(
    lam: Positive = 0.3,
    eps: Positive = 1.0,
    gamma_bar: NotNegative = 3.0,
    kappa: NotNegative = 0.0,
    max_epochs: Count = 10,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    lam: numerator of the weight; lower it where the model diverges.
    eps: added to gamma; an update of staleness 0 has the weight `lam` / `eps`.
    gamma_bar: gamma at which a device keeps its number of local epochs.
    kappa: local epochs by which that number changes per unit of gamma; 0: it never changes.
    max_epochs: largest number of local epochs with `kappa` > 0.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    weigh, immediate = by_distance(lam, eps), ImmediateDispatch(concurrency)
    if not kappa:
        return Strategy(name="asyncfeded", weigh=weigh, merge=Buffer(1), dispatch=immediate)
    adaptive = AdaptiveLocalEpochs(gamma_bar, kappa, max_epochs, immediate)
    return Strategy(
        name="asyncfeded",
        weigh=weigh,
        merge=adaptive,
        dispatch=adaptive.dispatch,
        varies_epochs=True,
    )

"""Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, 2021.

Synchronous rounds with devices selected by loss and speed (`parts.selecting.Oort`, Algorithm 1).
1.3 K devices are selected and the first K updates end the round; w <- w + server_lr * sum(n_i
delta_i) / sum(n_i) over them.
"""

from collections.abc import Iterable
from typing import Annotated

from annotated_types import Ge

from latecomer.core.strategy import Commit, ServerView, Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive, Proportion, Share
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.selecting import Oort, with_reported_loss
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

Factor = Annotated[float, Ge(1)]


class FirstArrivals(Epochs):
    """Merge: a round ends with the first `select.quorum` of its updates; later ones are dropped."""

    def __init__(self, select: Oort, step: float) -> None:
        super().__init__(quorum=1.0, keep_late=False, step=step)
        self.select = select

    def settle(self, view: ServerView) -> Iterable[Commit]:
        self.quorum = self.select.quorum
        return super().settle(view)


@recipe("oort", "synchronous rounds of devices selected by loss and speed", "Lai et al. 2021")
def oort(
    fraction: Share = 0.3,
    overcommit: Factor = 1.3,
    explore: Proportion = 0.9,
    explore_decay: Share = 0.98,
    explore_min: Proportion = 0.2,
    penalty: NotNegative = 2.0,
    pace: Share = 0.3,
    pace_step: Proportion = 0.05,
    window: Count = 20,
    max_participations: CountOrOff = 0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
) -> Strategy:
    """Options:

    fraction: K / N, the share of the present devices whose updates end a round.
    overcommit: devices selected per update needed, at least 1; raise it where devices fail often.
    explore: initial share of devices without an update among those selected (epsilon), 0 to 1.
    explore_decay: factor on `explore` per round.
    explore_min: lower bound of `explore`.
    penalty: exponent alpha of the factor (T / t_i)^alpha for devices slower than T.
    pace: quantile of the task times that is T; raise it to select slow devices more often.
    pace_step: added to `pace` when the utility of the last rounds has fallen, 0 to 1.
    window: rounds that are compared for this.
    max_participations: a device with more updates is no longer selected; 0: no bound.
    timeout, min_devices, server_lr: as in `fedavg`.
    """
    select = Oort(
        fraction,
        overcommit,
        explore,
        explore_decay,
        min(explore, explore_min),
        penalty,
        pace,
        pace_step,
        window,
        max_participations,
    )
    plain = Strategy(
        name="oort",
        weigh=by_examples(),
        merge=FirstArrivals(select, server_lr),
        dispatch=AtEpochStart(select, timeout, min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, select)

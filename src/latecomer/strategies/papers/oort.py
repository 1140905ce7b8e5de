"""Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection, 2021.

Synchronous rounds whose devices are chosen by what their data are worth and how fast they are
(`selecting.Oort`). More are asked than are waited for: 1.3 K devices, the first K close the round.
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


class FirstOf(Epochs):
    """Merge: a round ends when the wanted part of those selected is back; the rest is dropped."""

    def __init__(self, select: Oort, step: float) -> None:
        super().__init__(quorum=1.0, keep_late=False, step=step)
        self.select = select

    def settle(self, view: ServerView) -> Iterable[Commit]:
        self.quorum = self.select.quorum
        return super().settle(view)


@recipe("oort", "synchronous rounds of devices chosen by loss and speed", "Lai et al. 2021")
def oort(
    fraction: Share = 0.3,
    overcommit: Factor = 1.3,
    explore: Proportion = 0.9,
    explore_decay: Share = 0.98,
    explore_least: Proportion = 0.2,
    penalty: NotNegative = 2.0,
    pace: Share = 0.3,
    pace_step: Proportion = 0.05,
    window: Count = 20,
    most_turns: CountOrOff = 0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
) -> Strategy:
    """`fraction` of the devices is K / N; `docs/config.md` explains the others."""
    select = Oort(
        fraction,
        overcommit,
        explore,
        explore_decay,
        min(explore, explore_least),
        penalty,
        pace,
        pace_step,
        window,
        most_turns,
    )
    plain = Strategy(
        name="oort",
        weigh=by_examples(),
        merge=FirstOf(select, server_lr),
        dispatch=AtEpochStart(select, timeout, min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, select)

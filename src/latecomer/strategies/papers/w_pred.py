"""Hakimi et al., Taming Momentum in a Distributed Asynchronous Environment, 2019 (DANA).

As FedDC compares with it (W-Pred, section 8): the delay tau is known beforehand. The model tau
commits after a task was sent is predicted as w_pred = w_old + tau * (recent movement per commit),
and the late delta is corrected for w_pred - w_old by the first-order expansion of DC-ASGD.
"""

from dataclasses import replace
from typing import cast

from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import Count, NotNegative
from latecomer.strategies.papers.first_order import taylor
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.selecting import Select
from latecomer.strategies.recipe import recipe


class PredictedModelCompensation(Stateful):
    """Compensate: a late delta is expanded to w_pred = w_old + tau * movement per commit.

    The movement is the mean over the last `window` commits of the main lineage before the task was
    sent; one vector is kept for each version with an open task.
    """

    kept = ("_recent", "_movement")

    def __init__(self, lam: float, window: int, inner: Select) -> None:
        self.lam, self.window, self.inner = lam, window, inner
        self._recent: list[tuple[int, Tensor]] = []  # version and model of the last epochs
        self._movement: dict[int, Tensor] = {}

    def select(self, view: ServerView) -> list[int]:
        """Select: as `inner`; keeps the movement of the model that the devices are sent."""
        store = view.store
        head = store.head()
        if not self._recent or self._recent[-1][0] != head:
            self._recent = [*self._recent[-self.window :], (head, store.head_params())]
        self._movement = {v: m for v, m in self._movement.items() if store.pins(v)}
        before, params = self._recent[0]
        if head > before:
            self._movement[head] = (store.head_params() - params) / (head - before)
        return self.inner(view)

    def __call__(self, contribution: Contribution, view: ServerView) -> Contribution:
        task, tau = contribution.task, contribution.staleness
        movement = self._movement.get(task.version)
        if not tau or movement is None:
            return contribution  # on time, or sent before the first commit
        drift = tau * take(movement, task.submodel)  # w_pred - w_old
        head = take(view.store.head_params(contribution.lineage), task.submodel)
        return contribution.rebase(head, taylor(contribution.delta, drift, self.lam))


@recipe(
    "w-pred",
    "quorum epochs, late updates compensated towards a predicted global model",
    "Hakimi et al. 2019 (DANA)",
    of=(semi_async,),
)
def w_pred(plain: Strategy, lam: NotNegative = 4.0, window: Count = 1) -> Strategy:
    """Options, beside those of `semi-async`:

    lam: strength of the correction, as in `first-order`.
    window: commits over which the movement of the model is averaged; more are steadier and older.
    """
    start = cast(AtEpochStart, plain.dispatch)
    predict = PredictedModelCompensation(lam, window, start.select)
    start.select = predict.select
    return replace(plain, name="w-pred", compensate=predict)

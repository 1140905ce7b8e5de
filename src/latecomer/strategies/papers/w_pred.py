"""Hakimi et al., Taming Momentum in a Distributed Asynchronous Environment, 2019 (DANA).

As FedDC compares with it (W-Pred, section 8): the delay tau is known beforehand. The model tau
commits after a task was sent is predicted as w_pred = w_old + tau * (recent movement per commit),
and the late delta is corrected for w_pred - w_old by the first-order expansion of DC-ASGD.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import Count, NotNegative, Positive, Share
from latecomer.strategies.papers.first_order import taylor
from latecomer.strategies.papers.semi_async import quorum_epochs
from latecomer.strategies.parts.selecting import all_idle
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


class PredictedModelCompensation:
    """Compensate: a late delta is expanded to w_pred = w_old + tau * movement per commit.

    The movement is the mean over the last `window` commits of the main lineage before the task was
    sent; one vector is kept for each version with an open task.
    """

    def __init__(self, lam: float, window: int) -> None:
        self.lam, self.window = lam, window
        self._recent: deque[tuple[int, Tensor]] = deque(maxlen=window + 1)
        self._movement: dict[int, Tensor] = {}

    def select(self, view: ServerView) -> list[int]:
        """Select: every idle device; keeps the movement of the model that they are sent."""
        store = view.store
        head = store.head()
        if not self._recent or self._recent[-1][0] != head:
            self._recent.append((head, store.head_params()))
        self._movement = {v: m for v, m in self._movement.items() if store.pins(v)}
        before, params = self._recent[0]
        if head > before:
            self._movement[head] = (store.head_params() - params) / (head - before)
        return all_idle(view)

    def __call__(self, contribution: Contribution, view: ServerView) -> Contribution:
        task, tau = contribution.task, contribution.staleness
        movement = self._movement.get(task.version)
        if not tau or movement is None:
            return contribution  # on time, or sent before the first commit
        drift = tau * take(movement, task.submodel)  # w_pred - w_old
        head = take(view.store.head_params(contribution.lineage), task.submodel)
        return contribution.rebase(head, taylor(contribution.delta, drift, self.lam))

    def state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "movement": dict(self._movement)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self.window + 1)
        self._movement = dict(state["movement"])


@recipe(
    "w-pred",
    "quorum epochs, late updates compensated towards a predicted global model",
    "Hakimi et al. 2019 (DANA)",
)
def w_pred(
    lam: NotNegative = 4.0,
    window: Count = 1,
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
) -> Strategy:
    """Options:

    lam: strength of the correction, as in `first-order`.
    window: commits over which the movement of the model is averaged; more are steadier and older.
    quorum, min_devices, server_lr: as in `semi-async`.
    """
    predict = PredictedModelCompensation(lam, window)
    return quorum_epochs(
        "w-pred", by_examples(), quorum, min_devices, server_lr, predict, predict.select
    )

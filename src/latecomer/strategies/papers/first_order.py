"""Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017 (DC-ASGD).

As FedDC compares with it: a late delta is brought to today's model by the first term of its Taylor
expansion, with the Hessian taken as diagonal and proportional to the squared gradient.
"""

from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Compensate, ServerView, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import Count, NotNegative, Positive, Share
from latecomer.strategies.papers.semi_async import quorum_epochs
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


def taylor(delta: Tensor, drift: Tensor, lam: float) -> Tensor:
    """delta - lam * delta * delta * drift: the delta as if the model had moved by `drift` before.

    The correction of a coordinate is at most as large as its delta. The expansion is for small
    corrections; without the bound, larger ones feed on each other until the model overflows.
    """
    return delta * (1 - lam * drift * delta).clamp(0, 2)  # FedDC, Eq. 1 and 2


def to_the_head(lam: float) -> Compensate:
    """Compensate: a late delta is expanded from the model it was trained on to the head."""

    def compensate(contribution: Contribution, view: ServerView) -> Contribution:
        if not contribution.staleness:
            return contribution
        head = take(view.store.head_params(contribution.lineage), contribution.task.submodel)
        delta = taylor(contribution.delta, head - contribution.base, lam)
        return contribution.rebase(head, delta)

    return compensate


@recipe(
    "first-order",
    "quorum epochs, late updates compensated by a first-order Taylor expansion",
    "Zheng et al. 2017 (DC-ASGD)",
)
def first_order(
    lam: NotNegative = 4.0,
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
) -> Strategy:
    """`lam` is the paper's lambda over learning rate and local steps: it acts on deltas.

    4 is what the authors of FedDC use in their code.
    """
    compensate = to_the_head(lam)
    return quorum_epochs(
        "first-order", by_examples(), quorum, min_devices, server_lr, compensate=compensate
    )

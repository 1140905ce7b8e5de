"""Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017 (DC-ASGD).

As FedDC compares with it (Eq. 1 and 2): a late delta is corrected for the movement of the model
since its base by a first-order Taylor expansion, delta - lam * delta * delta * (w_now - w_old)
elementwise, with the Hessian approximated by the squared gradient on the diagonal.
"""

from dataclasses import replace

from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Compensate, ServerView, Strategy
from latecomer.core.submodel import take
from latecomer.strategies.options import NotNegative
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.recipe import recipe


def taylor(delta: Tensor, drift: Tensor, lam: float) -> Tensor:
    """delta - lam * delta * delta * drift, elementwise, where `drift` is the model's movement.

    The correction of a coordinate is at most as large as its delta: without this bound large
    corrections cause larger ones until the model overflows.
    """
    return delta * (1 - lam * drift * delta).clamp(0, 2)  # FedDC, Eq. 1 and 2


def first_order_compensation(lam: float) -> Compensate:
    """Compensate: a late delta is expanded from its base to the head."""

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
    of=(semi_async,),
)
def first_order(plain: Strategy, lam: NotNegative = 4.0) -> Strategy:
    """Options, beside those of `semi-async`:

    lam: strength of the correction, the paper's lambda divided by learning rate and local steps,
        because it acts on deltas; 0: none. 4 is the value in the code of FedDC's authors.
    """
    return replace(plain, name="first-order", compensate=first_order_compensation(lam))

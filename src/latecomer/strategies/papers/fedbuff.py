"""Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022 (FedBuff).

Deltas (each against the model its device was sent) are gathered; every K of them move the model
by server_lr * (1/K) * sum of s(tau_i) delta_i (Algorithm 1), s(tau) = 1 / sqrt(1 + tau).
"""

from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive
from latecomer.strategies.papers.fedasync import DecayName, staleness_decay
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import by_staleness
from latecomer.strategies.recipe import recipe


@recipe("fedbuff", "gather K updates, then move the model once", "Nguyen et al. 2022")
def fedbuff(
    size: Count = 10,
    server_lr: Positive = 1.0,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    return Strategy(
        name="fedbuff",
        weigh=by_staleness(staleness_decay(decay, p, b)),
        merge=Buffer(size, step=server_lr),
        dispatch=ImmediateDispatch(concurrency),
    )

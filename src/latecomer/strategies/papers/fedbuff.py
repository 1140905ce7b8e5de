"""Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022 (FedBuff).

The server buffers deltas, each relative to the model its device was sent. Every K of them make a
commit, w <- w + server_lr * (1/K) * sum of s(tau_i) delta_i with s(tau) = 1 / sqrt(1 + tau)
(Algorithm 1).
"""

from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive
from latecomer.strategies.papers.fedasync import DecayName, staleness_decay
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import by_staleness
from latecomer.strategies.recipe import recipe


@recipe("fedbuff", "buffer of K updates, discounted by staleness", "Nguyen et al. 2022")
def fedbuff(
    size: Count = 10,
    server_lr: Positive = 1.0,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    size: K, updates per commit; more make steps steadier and rarer.
    server_lr: factor on the mean of the buffer; lower it where the model diverges.
    decay: s(tau): "constant" 1, "polynomial" (1 + tau)^-p, "hinge" 1 / (p (tau - b) + 1) or
        "reciprocal" 1 / (p (tau - b)) for tau > b; "constant" if stale updates must count in full.
    p: exponent or slope of the decay.
    b: staleness in commits up to which "hinge" and "reciprocal" do not discount.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    return Strategy(
        name="fedbuff",
        weigh=by_staleness(staleness_decay(decay, p, b)),
        merge=Buffer(size, step=server_lr),
        dispatch=ImmediateDispatch(concurrency),
    )

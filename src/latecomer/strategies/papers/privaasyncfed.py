"""Cheng, Xue, Zhu, Privacy-Preserving Asynchronous FL for Heterogeneous IoT Devices.

Every update is mixed in on arrival, on the coordinates of its device's sub-model (Eqs. 12-14):
w <- (1 - a) w + a w_i with a = beta * S(tau) (Eqs. 15, 16). The widths of the sub-models are set in
`[submodels]`, the noise that devices add in `[privacy]`.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import CountOrOff, NotNegative, Share
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.recipe import recipe


@recipe(
    "privaasyncfed",
    "sub-models by device, mixed in on arrival, with local differential privacy",
    "PrivaAsyncFed",
    widths=True,
    private=True,
)
def privaasyncfed(
    beta: Share = 0.6, a: NotNegative = 0.5, b: NotNegative = 4.0, concurrency: CountOrOff = 0
) -> Strategy:
    """Options:

    beta: mixing weight of an update of staleness 0, up to 1.
    a: slope of the decay, S(tau) = min(1, 1 / (a (tau - b))) for tau > b (Eq. 16, bounded by 1).
    b: staleness in commits up to which S(tau) = 1.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    plain = fedasync(alpha=beta, decay="reciprocal", p=a, b=b, concurrency=concurrency)
    return replace(plain, name="privaasyncfed")


@recipe(
    "dp-fedasync",
    "FedAsync on the whole model with local differential privacy",
    "Xie et al. 2019, PrivaAsyncFed's baseline",
    of=(fedasync,),
    private=True,
)
def dp_fedasync(plain: Strategy) -> Strategy:
    """The options of `fedasync`."""
    return replace(plain, name="dp-fedasync")

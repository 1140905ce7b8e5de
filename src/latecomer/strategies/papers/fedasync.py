"""Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019 (FedAsync).

Every update is mixed in as it arrives: w <- (1 - a) w + a w_i with a = alpha * s(tau).
"""

from typing import Literal

from latecomer.core.strategy import ImmediateDispatch, Mix, Strategy
from latecomer.strategies.options import CountOrOff, NotNegative, Share
from latecomer.strategies.parts.weighting import (
    Decay,
    by_staleness,
    constant,
    hinge,
    polynomial,
    reciprocal,
)
from latecomer.strategies.recipe import recipe

DecayName = Literal["constant", "polynomial", "hinge", "reciprocal"]


def staleness_decay(name: DecayName, p: float, b: float) -> Decay:
    """s(tau) by name, section 5.2 (`reciprocal` is PrivaAsyncFed's)."""
    match name:
        case "constant":
            return constant()
        case "polynomial":
            return polynomial(p)
        case "hinge":
            return hinge(p, b)
        case "reciprocal":
            return reciprocal(p, b)


@recipe("fedasync", "mix every update in at once, less the staler it is", "Xie et al. 2019")
def fedasync(
    alpha: Share = 0.6,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """`p`: exponent or slope, `b`: where the hinge bends; at most `concurrency` devices work."""
    return Strategy(
        name="fedasync",
        weigh=by_staleness(staleness_decay(decay, p, b), scale=alpha),
        merge=Mix(),
        dispatch=ImmediateDispatch(concurrency),
    )

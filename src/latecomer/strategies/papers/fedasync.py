"""Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019 (FedAsync).

Every update is mixed in on arrival: w <- (1 - a) w + a w_i with a = alpha * s(tau), where w_i is
the model of the device and s a decay of its staleness tau (section 5.2).
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
    """The decay s(tau) of that name, section 5.2 ("reciprocal": PrivaAsyncFed, Eq. 16)."""
    match name:
        case "constant":
            return constant()
        case "polynomial":
            return polynomial(p)
        case "hinge":
            return hinge(p, b)
        case "reciprocal":
            return reciprocal(p, b)


@recipe(
    "fedasync", "mix every update in on arrival, discounted by its staleness", "Xie et al. 2019"
)
def fedasync(
    alpha: Share = 0.6,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    alpha: mixing weight of an update of staleness 0, up to 1; lower it where the model oscillates.
    decay: s(tau): "constant" 1, "polynomial" (1 + tau)^-p, "hinge" 1 / (p (tau - b) + 1) or
        "reciprocal" 1 / (p (tau - b)) for tau > b; "constant" if stale updates must count in full.
    p: exponent or slope of the decay.
    b: staleness in commits up to which "hinge" and "reciprocal" do not discount.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    return Strategy(
        name="fedasync",
        weigh=by_staleness(staleness_decay(decay, p, b), scale=alpha),
        merge=Mix(),
        dispatch=ImmediateDispatch(concurrency),
    )

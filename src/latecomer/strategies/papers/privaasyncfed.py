"""Cheng, Xue, Zhu, Privacy-Preserving Asynchronous FL for Heterogeneous IoT Devices.

Every update is mixed in as it arrives, on the coordinates that its device carries (Eqs. 12-14),
with alpha = beta * S(tau) (Eqs. 15, 16). Who carries how much is the config's `submodels`, the
noise on the devices its `privacy`.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import CountOrOff, NotNegative, Share
from latecomer.strategies.papers.fedasync import DecayName, fedasync
from latecomer.strategies.recipe import recipe


@recipe(
    "privaasyncfed",
    "sub-models that fit the device, mixed as they come, with local privacy",
    "PrivaAsyncFed",
    widths=True,
    private=True,
)
def privaasyncfed(
    beta: Share = 0.6, a: NotNegative = 0.5, b: NotNegative = 4.0, concurrency: CountOrOff = 0
) -> Strategy:
    """`a`: how fast the weight falls past a staleness of `b` (Eq. 16, never above 1)."""
    plain = fedasync(alpha=beta, decay="reciprocal", p=a, b=b, concurrency=concurrency)
    return replace(plain, name="privaasyncfed")


@recipe(
    "dp-fedasync",
    "FedAsync on the whole model with the same local privacy",
    "Xie et al. 2019, PrivaAsyncFed's baseline",
    private=True,
)
def dp_fedasync(
    alpha: Share = 0.6,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options as those of `fedasync`."""
    return replace(fedasync(alpha, decay, p, b, concurrency), name="dp-fedasync")

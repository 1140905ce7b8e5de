"""Gajanin et al., Towards Adaptive Asynchronous FL for Human Activity Recognition, 2024.

The asynchronous baseline: every update moves the model at once, by the device's share of all
examples and one mixing ratio. Staleness does not count.
"""

from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import CountOrOff, Positive
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


@recipe(
    "async-share",
    "add every update at once, by its device's share of the examples",
    "Gajanin et al. 2024",
)
def async_share(mixing: Positive = 0.8, concurrency: CountOrOff = 0) -> Strategy:
    """`mixing` is the paper's ratio; at most `concurrency` devices work."""
    return Strategy(
        name="async-share",
        weigh=ByShareOfExamples(),
        merge=Buffer(1, step=mixing),  # Eq. 2: x <- x + mixing * (n_i / N) * delta_i
        dispatch=ImmediateDispatch(concurrency),
    )

"""Gajanin et al., Towards Adaptive Asynchronous FL for Human Activity Recognition, 2024.

The paper's asynchronous baseline: every update is added on arrival by its device's share of all
examples, x <- x + mixing * (n_i / N) delta_i (Eq. 2, corrected). Staleness is ignored.
"""

from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import CountOrOff, Positive
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


@recipe(
    "async-share",
    "add every update on arrival, by its device's share of the examples",
    "Gajanin et al. 2024",
)
def async_share(mixing: Positive = 0.8, concurrency: CountOrOff = 0) -> Strategy:
    """Options:

    mixing: factor on the share of examples; the paper tries 0.2, 0.4 and 0.8.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    return Strategy(
        name="async-share",
        weigh=ByShareOfExamples(),
        merge=Buffer(1, step=mixing),  # Eq. 2
        dispatch=ImmediateDispatch(concurrency),
    )

"""McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

A synchronous round: send the model to (a sample of) the devices, wait for all of them, average.
"""

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, NotNegative, Positive, Share
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.selecting import SelectName, selector, with_reported_loss
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe


@recipe("fedavg", "synchronous rounds, average by number of examples", "McMahan et al. 2017")
def fedavg(
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
) -> Strategy:
    """`timeout` seconds after its start a round closes with whoever is back; 0 waits for all."""
    chosen = selector(select, fraction)
    plain = Strategy(
        name="fedavg",
        weigh=by_examples(),
        merge=Epochs(quorum=1.0, keep_late=False, step=server_lr),
        dispatch=AtEpochStart(chosen, timeout, min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, chosen)

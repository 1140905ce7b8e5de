"""McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.

Synchronous rounds: the model is sent to a sample of the devices; when all have answered,
w <- w + server_lr * sum(n_i delta_i) / sum(n_i), with n_i the number of examples of device i.
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
    """Options:

    fraction: share of the present devices that a round selects.
    timeout: seconds after which a round ends with the updates received; 0: no bound. Set it where
        devices may be late.
    min_devices: idle devices needed to begin a round.
    server_lr: factor on the averaged delta.
    select: which devices: "random", or "oort" by loss and speed with the defaults of the strategy
        `oort`.
    """
    chosen = selector(select, fraction)
    plain = Strategy(
        name="fedavg",
        weigh=by_examples(),
        merge=Epochs(quorum=1.0, keep_late=False, step=server_lr),
        dispatch=AtEpochStart(chosen, timeout, min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, chosen)

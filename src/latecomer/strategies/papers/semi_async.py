"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

The setting of FedDC's comparison: an epoch ends when 70% of the devices sent its model are back
(section 7), w <- w + server_lr * sum(a_i delta_i) / sum(a_i). "Unweighted" averages late updates
into the epoch of their arrival with a_i = n_i; "Weighted" has a_i = n_i / (1 + exp(a (tau - b)))
(section 8.1). "Unstale" is the same without any delay: the bound of any compensation (Intertwined).
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, Positive, Share
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.selecting import SelectName, selector, with_reported_loss
from latecomer.strategies.parts.weighting import by_examples, sigmoid
from latecomer.strategies.recipe import recipe


@recipe(
    "semi-async",
    "quorum epochs, late updates averaged in full on arrival (the papers' Unweighted)",
    "Wang and Gao 2025 (FedDC)",
)
def semi_async(
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
    fraction: Share = 1.0,
) -> Strategy:
    """Options:

    quorum: share of the devices sent a model whose updates end its epoch; lower it where many
        uploads are in flight.
    min_devices: idle devices needed to begin an epoch.
    server_lr: factor on the averaged delta.
    select: which devices begin an epoch, as in `fedavg`.
    fraction: share of the present devices that begin an epoch.
    """
    chosen = selector(select, fraction)
    plain = Strategy(
        name="semi-async",
        weigh=by_examples(),
        merge=Epochs(quorum, step=server_lr),
        dispatch=AtEpochStart(chosen, minimum=min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, chosen)


@recipe(
    "weighted",
    "quorum epochs, late updates discounted by a sigmoid of their staleness",
    "Wang and Gao 2025 (FedDC)",
    of=(semi_async,),
)
def weighted(plain: Strategy, a: Positive = 0.25, b: float = 10.0) -> Strategy:
    """Options, beside those of `semi-async`:

    a: steepness of the sigmoid 1 / (1 + exp(a (tau - b))).
    b: staleness in epochs at which it is 1/2; raise it where late updates must count.
    """
    return replace(plain, name="weighted", weigh=by_examples(sigmoid(a, b)))


@recipe(
    "unstale",
    "semi-async without the delay of fleet.late: the bound of any compensation",
    "Wang and Gao (Intertwined)",
    of=(semi_async,),
    punctual=True,
)
def unstale(plain: Strategy) -> Strategy:
    """The options of `semi-async`; the runner leaves out the delay."""
    return replace(plain, name="unstale")

"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

The setting of FedDC's comparison: an epoch ends when 70% of the devices sent its model are back
(section 7), w <- w + server_lr * sum(a_i delta_i) / sum(a_i). "Unweighted" averages late updates
into the epoch of their arrival with a_i = n_i; "Weighted" has a_i = n_i / (1 + exp(a (tau - b)))
(section 8.1). "Unstale" is the same without any delay: the bound of any compensation (Intertwined).
"""

from dataclasses import replace

from latecomer.core.strategy import Compensate, Strategy, Weigh, no_compensation
from latecomer.strategies.options import Count, Positive, Share
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs, Surrogates
from latecomer.strategies.parts.selecting import (
    Select,
    SelectName,
    all_idle,
    selector,
    with_reported_loss,
)
from latecomer.strategies.parts.weighting import by_examples, sigmoid
from latecomer.strategies.recipe import recipe


def quorum_epochs(
    name: str,
    weigh: Weigh,
    quorum: float,
    min_devices: int,
    step: float,
    compensate: Compensate = no_compensation,
    select: Select = all_idle,
    surrogates: Surrogates | None = None,
) -> Strategy:
    """Semi-asynchronous epochs with these parts; `step` is the server learning rate."""
    plain = Strategy(
        name=name,
        compensate=compensate,
        weigh=weigh,
        merge=Epochs(quorum, keep_late=True, step=step, surrogates=surrogates),
        dispatch=AtEpochStart(select, minimum=min_devices),
        has_epochs=True,
    )
    return with_reported_loss(plain, select)


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
    return quorum_epochs("semi-async", by_examples(), quorum, min_devices, server_lr, select=chosen)


@recipe(
    "weighted",
    "quorum epochs, late updates discounted by a sigmoid of their staleness",
    "Wang and Gao 2025 (FedDC)",
)
def weighted(
    a: Positive = 0.25,
    b: float = 10.0,
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
    fraction: Share = 1.0,
) -> Strategy:
    """Options:

    a: steepness of the sigmoid 1 / (1 + exp(a (tau - b))).
    b: staleness in epochs at which it is 1/2; raise it where late updates must count.
    quorum, min_devices, server_lr, select, fraction: as in `semi-async`.
    """
    weigh, chosen = by_examples(sigmoid(a, b)), selector(select, fraction)
    return quorum_epochs("weighted", weigh, quorum, min_devices, server_lr, select=chosen)


@recipe(
    "unstale",
    "semi-async without the delay of fleet.late: the bound of any compensation",
    "Wang and Gao (Intertwined)",
    punctual=True,
)
def unstale(
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
    fraction: Share = 1.0,
) -> Strategy:
    """Options (the runner leaves out the delay; otherwise this is `semi-async`):

    quorum, min_devices, server_lr, select, fraction: as in `semi-async`.
    """
    plain = semi_async(quorum, min_devices, server_lr, select, fraction)
    return replace(plain, name="unstale")

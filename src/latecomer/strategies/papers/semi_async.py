"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

The setting of FedDC's comparison: an epoch ends when 70% of the devices are back (section 7).
"Unweighted" adds late updates as they come; "Weighted" discounts them by a sigmoid (section 8.1).
"Unstale", the same without any delay, is what a perfect compensation would reach (Intertwined).
"""

from dataclasses import replace

from latecomer.core.strategy import Compensate, Strategy, Weigh, no_compensation
from latecomer.strategies.options import Count, Positive, Share
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs, Surrogates
from latecomer.strategies.parts.selecting import (
    Select,
    SelectName,
    everyone,
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
    select: Select = everyone,
    surrogates: Surrogates | None = None,
) -> Strategy:
    """Semi-asynchronous epochs with a given weight for each update."""
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
    "quorum epochs, late updates added in full when they come (the papers' Unweighted)",
    "Wang and Gao 2025 (FedDC)",
)
def semi_async(
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
    fraction: Share = 1.0,
) -> Strategy:
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
    """Weight 1 / (1 + exp(a (tau - b)))."""
    weigh, chosen = by_examples(sigmoid(a, b)), selector(select, fraction)
    return quorum_epochs("weighted", weigh, quorum, min_devices, server_lr, select=chosen)


@recipe(
    "unstale",
    "semi-async as if nobody of fleet.late were late: what compensation could reach at best",
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
    """The runner leaves the delay out; by itself it is `semi-async`."""
    plain = semi_async(quorum, min_devices, server_lr, select, fraction)
    return replace(plain, name="unstale")

"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

FedDC: epochs that end at a quorum, in which late updates are compensated by gradient inversion
(sections 3 to 5; `parts.compensation`, `parts.inversion`): the server estimates examples that
reproduce the late update and trains the present model on them. Added from the sequel ("Tackling
Intertwined Data and Device Heterogeneities in Federated Learning with Unlimited Staleness"): the
uniqueness gate and the smooth switch-off. `feddc-fedasync` and `feddc-fedbuff` compensate late
updates in the fully asynchronous strategies.
"""

from dataclasses import replace
from typing import Literal

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive, Share
from latecomer.strategies.papers.fedasync import DecayName, fedasync
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.semi_async import quorum_epochs
from latecomer.strategies.parts.catch_up import CatchUp
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.uniqueness import Gate
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

Size = Literal["samples", "sensor", "images"]
PAPER = "Wang and Gao 2025 (FedDC)"
SHARES = {"samples": 0.0, "sensor": 1 / 16, "images": 1 / 2}  # of the device's number of examples


@recipe("feddc", "quorum epochs, late updates compensated by gradient inversion", PAPER)
def feddc(
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    samples: Count = 32,
    size: Size = "samples",
    iterations: Count = 40,
    warm_iterations: CountOrOff = 8,
    mask: Share = 1.0,
    steps: Count = 50,
    scale: Positive = 1.0,
    gate: Gate = "mean",
    switch: bool = True,
    fade: NotNegative = 0.1,
    min_staleness: Count = 1,
    reuse: NotNegative = 1.25,
    surrogates: bool = False,
    catch_up: NotNegative = 1.0,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """Options (`docs/studies/feddc.md` measures them):

    quorum, min_devices, server_lr: as in `semi-async`.
    samples: examples that are estimated for a late device.
    size: how many examples: "samples", or the papers' shares of the device's number of examples,
        "sensor" 1/16 and "images" 1/2, at most 256.
    iterations: optimiser steps of an inversion from random examples; more fit better and cost more.
    warm_iterations: optimiser steps from the examples last estimated for the device.
    mask: share of the coordinates, the largest, on which the update must be reproduced; the papers
        have 0.05.
    steps: largest number of local training steps that are unrolled; fewer cost less memory.
    scale: standard deviation of the initial random examples.
    gate: which late updates are compensated: "mean", those whose mean cosine distance to the
        updates on time exceeds the mean distance among these; "nearest", those whose distance to
        the closest exceeds half of that; "off", all.
    switch: end compensation once most estimates have larger errors than the stale updates.
    fade: share of the commits before the switch-off over which compensation then fades out.
    min_staleness: staleness in epochs from which an update is late.
    reuse: earlier examples of a device are used again if they reproduce its new update with at most
        this times their own error; 0: never.
    surrogates: add surrogate updates for absent devices.
    catch_up: largest extra weight of compensated updates until the epochs missed in the device's
        longest absence are made up for; 0: none (the papers).
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    save_estimates: keep estimated examples in checkpoints; otherwise inversions restart cold.
    """
    weigh = CatchUp(by_examples(), catch_up)
    compensator = InversionCompensator(
        Effort(samples, SHARES[size], iterations, warm_iterations, mask, steps, scale),
        gate=gate,
        switch=SwitchOff(fade, switch),
        min_staleness=min_staleness,
        reuse=reuse,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )
    absent = SurrogateUpdates(compensator, weigh) if surrogates else None
    return quorum_epochs(
        "feddc", weigh, quorum, min_devices, server_lr, compensator, surrogates=absent
    )


@recipe(
    "feddc-fedasync",
    "FedAsync, unusually late updates compensated by gradient inversion",
    PAPER,
)
def feddc_fedasync(
    alpha: Share = 0.6,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
    samples: Count = 32,
    iterations: Count = 40,
    warm_iterations: CountOrOff = 8,
    mask: Share = 1.0,
    gate: Gate = "mean",
    switch: bool = True,
    min_staleness: Count = 1,
    min_ratio: NotNegative = 2.0,
    reuse: NotNegative = 1.25,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """Options:

    alpha, decay, p, b, concurrency: as in `fedasync`.
    min_ratio: an update is late if it is at least this times as stale as the mean of those on time.
    samples, iterations, warm_iterations, mask, gate, switch: as in `feddc`.
    min_staleness, reuse, server_gflops, save_estimates: as in `feddc`.
    """
    compensator = _asynchronous(
        Effort(samples, iterations=iterations, warm_iterations=warm_iterations, mask=mask),
        *(gate, switch, min_staleness, min_ratio, reuse, server_gflops, save_estimates),
    )
    plain = fedasync(alpha, decay, p, b, concurrency)
    return replace(plain, name="feddc-fedasync", compensate=compensator)


@recipe(
    "feddc-fedbuff",
    "FedBuff, unusually late updates compensated by gradient inversion",
    PAPER,
)
def feddc_fedbuff(
    size: Count = 10,
    server_lr: Positive = 1.0,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
    samples: Count = 32,
    iterations: Count = 40,
    warm_iterations: CountOrOff = 8,
    mask: Share = 1.0,
    gate: Gate = "mean",
    switch: bool = True,
    min_staleness: Count = 1,
    min_ratio: NotNegative = 2.0,
    reuse: NotNegative = 1.25,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """Options:

    size, server_lr, decay, p, b, concurrency: as in `fedbuff`.
    samples, iterations, warm_iterations, mask, gate, switch: as in `feddc`.
    min_staleness, reuse, server_gflops, save_estimates: as in `feddc`.
    min_ratio: as in `feddc-fedasync`.
    """
    compensator = _asynchronous(
        Effort(samples, iterations=iterations, warm_iterations=warm_iterations, mask=mask),
        *(gate, switch, min_staleness, min_ratio, reuse, server_gflops, save_estimates),
    )
    plain = fedbuff(size, server_lr, decay, p, b, concurrency)
    return replace(plain, name="feddc-fedbuff", compensate=compensator)


def _asynchronous(
    effort: Effort,
    gate: Gate,
    switch: bool,
    min_staleness: int,
    min_ratio: float,
    reuse: float,
    server_gflops: float,
    save_estimates: bool,
) -> InversionCompensator:
    """Compensation for fully asynchronous strategies, with the options of their recipes."""
    return InversionCompensator(
        effort,
        gate=gate,
        switch=SwitchOff(enabled=switch),
        min_staleness=min_staleness,
        min_ratio=min_ratio,
        reuse=reuse,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )

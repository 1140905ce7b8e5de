"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

FedDC: epochs that end at a quorum, in which late updates are compensated by gradient inversion
(sections 3 to 5; `parts.compensation`, `parts.inversion`): the server estimates examples that
reproduce the late update and trains the present model on them. Added from the sequel ("Tackling
Intertwined Data and Device Heterogeneities in Federated Learning with Unlimited Staleness"): the
uniqueness gate and the smooth switch-off. `feddc-fedasync` and `feddc-fedbuff` compensate late
updates in the fully asynchronous strategies.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, cast

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive, Share
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.parts.catch_up import CatchUp
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.uniqueness import Gate
from latecomer.strategies.recipe import recipe

Size = Literal["samples", "sensor", "images"]
PAPER = "Wang and Gao 2025 (FedDC)"
SHARES = {"samples": 0.0, "sensor": 1 / 16, "images": 1 / 2}  # of the device's number of examples


def inversion(
    samples: Count = 32,
    iterations: Count = 40,
    warm_iterations: CountOrOff = 8,
    mask: Share = 1.0,
    gate: Gate = "mean",
    switch: bool = True,
    min_staleness: Count = 1,
    min_ratio: NotNegative = 0.0,
    reuse: NotNegative = 1.25,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> InversionCompensator:
    """Options:

    samples: examples that are estimated for a late device.
    iterations: optimiser steps of an inversion from random examples; more fit better and cost more.
    warm_iterations: optimiser steps from the examples last estimated for the device.
    mask: share of the coordinates, the largest, on which the update must be reproduced; the papers
        have 0.05.
    gate: which late updates are compensated: "mean", those whose mean cosine distance to the
        updates on time exceeds the mean distance among these; "nearest", those whose distance to
        the closest exceeds half of that; "off", all.
    switch: end compensation once most estimates have larger errors than the stale updates.
    min_staleness: staleness in commits from which an update is late.
    min_ratio: it must also be at least this times as stale as the mean of the updates on time.
    reuse: earlier examples of a device are used again if they reproduce its new update with at most
        this times their own error; 0: never.
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    save_estimates: keep estimated examples in checkpoints; otherwise inversions restart cold.
    """
    return InversionCompensator(
        Effort(samples, iterations=iterations, warm_iterations=warm_iterations, mask=mask),
        gate=gate,
        switch=SwitchOff(enabled=switch),
        min_staleness=min_staleness,
        min_ratio=min_ratio,
        reuse=reuse,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )


@recipe(
    "feddc",
    "quorum epochs, late updates compensated by gradient inversion",
    PAPER,
    of=(semi_async, inversion),
)
def feddc(
    plain: Strategy,
    compensator: InversionCompensator,
    size: Size = "samples",
    steps: Count = 50,
    scale: Positive = 1.0,
    fade: NotNegative = 0.1,
    surrogates: bool = False,
    catch_up: NotNegative = 1.0,
) -> Strategy:
    """Options, beside those of `semi-async` and `inversion` (`docs/studies/feddc.md`):

    size: how many examples: "samples", or the papers' shares of the device's number of examples,
        "sensor" 1/16 and "images" 1/2, at most 256.
    steps: largest number of local training steps that are unrolled; fewer cost less memory.
    scale: standard deviation of the initial random examples.
    fade: share of the commits before the switch-off over which compensation then fades out.
    surrogates: add surrogate updates for absent devices.
    catch_up: largest extra weight of compensated updates until the epochs missed in the device's
        longest absence are made up for; 0: none (the papers).
    """
    weigh = CatchUp(plain.weigh, catch_up)
    effort = replace(compensator.effort, share=SHARES[size], steps=steps, scale=scale)
    compensator.effort, compensator.validation.switch.decay = effort, fade
    if surrogates:
        cast(Epochs, plain.merge).surrogates = SurrogateUpdates(compensator, weigh)
    return replace(plain, name="feddc", compensate=compensator, weigh=weigh)


UNUSUALLY_LATE = partial(inversion, min_ratio=2.0)


@recipe(
    "feddc-fedasync",
    "FedAsync, unusually late updates compensated by gradient inversion",
    PAPER,
    of=(fedasync, UNUSUALLY_LATE),
)
def feddc_fedasync(plain: Strategy, compensator: InversionCompensator) -> Strategy:
    """The options of `fedasync` and `inversion`."""
    return replace(plain, name="feddc-fedasync", compensate=compensator)


@recipe(
    "feddc-fedbuff",
    "FedBuff, unusually late updates compensated by gradient inversion",
    PAPER,
    of=(fedbuff, UNUSUALLY_LATE),
)
def feddc_fedbuff(plain: Strategy, compensator: InversionCompensator) -> Strategy:
    """The options of `fedbuff` and `inversion`."""
    return replace(plain, name="feddc-fedbuff", compensate=compensator)

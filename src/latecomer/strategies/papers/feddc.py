"""Wang and Gao, When Device Delays Meet Data Heterogeneity in Federated AIoT Applications, 2025.

FedDC: quorum epochs in which late updates are repaired by gradient inversion before they count in
full (sections 3 to 5, with the uniqueness gate and the smooth switch of the sequel, "Tackling
Intertwined Data and Device Heterogeneities in Federated Learning with Unlimited Staleness").
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
from latecomer.strategies.parts.uniqueness import Rule
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

Size = Literal["samples", "sensor", "images"]
PAPER = "Wang and Gao 2025 (FedDC)"
SHARES = {"samples": 0.0, "sensor": 1 / 16, "images": 1 / 2}


@recipe("feddc", "quorum epochs, late updates made fresh by gradient inversion", PAPER)
def feddc(
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    samples: Count = 32,
    size: Size = "samples",
    iterations: Count = 40,
    warm_iterations: CountOrOff = 8,
    keep: Share = 1.0,
    steps: Count = 50,
    scale: Positive = 1.0,
    gate: Rule = "mean",
    switch: bool = True,
    fade: NotNegative = 0.1,
    min_staleness: Count = 1,
    reuse: NotNegative = 1.25,
    surrogates: bool = False,
    catch_up: NotNegative = 1.0,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """`docs/config.md` explains the options; `docs/studies/feddc.md` measures them."""
    weigh = CatchUp(by_examples(), catch_up)
    compensator = InversionCompensator(
        Effort(samples, SHARES[size], iterations, warm_iterations, keep, steps, scale),
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
    "mix every update in at once, unusually late ones made fresh by gradient inversion",
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
    keep: Share = 1.0,
    gate: Rule = "mean",
    switch: bool = True,
    min_staleness: Count = 1,
    min_ratio: NotNegative = 2.0,
    reuse: NotNegative = 1.25,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """Late is who is `min_ratio` times as stale as usual."""
    compensator = InversionCompensator(
        Effort(samples, iterations=iterations, warm_iterations=warm_iterations, keep=keep),
        gate=gate,
        switch=SwitchOff(enabled=switch),
        min_staleness=min_staleness,
        min_ratio=min_ratio,
        reuse=reuse,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )
    plain = fedasync(alpha, decay, p, b, concurrency)
    return replace(plain, name="feddc-fedasync", compensate=compensator)


@recipe(
    "feddc-fedbuff",
    "gather K updates, unusually late ones made fresh by gradient inversion",
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
    keep: Share = 1.0,
    gate: Rule = "mean",
    switch: bool = True,
    min_staleness: Count = 1,
    min_ratio: NotNegative = 2.0,
    reuse: NotNegative = 1.25,
    server_gflops: NotNegative = 10.0,
    save_estimates: bool = True,
) -> Strategy:
    """Late is who is `min_ratio` times as stale as usual."""
    compensator = InversionCompensator(
        Effort(samples, iterations=iterations, warm_iterations=warm_iterations, keep=keep),
        gate=gate,
        switch=SwitchOff(enabled=switch),
        min_staleness=min_staleness,
        min_ratio=min_ratio,
        reuse=reuse,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )
    plain = fedbuff(size, server_lr, decay, p, b, concurrency)
    return replace(plain, name="feddc-fedbuff", compensate=compensator)

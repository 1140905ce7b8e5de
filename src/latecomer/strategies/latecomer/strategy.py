"""The default strategy: cached aggregation with a measured step, and compensation of late updates.

Parts and the papers they come from:
- every commit averages the cached updates of all devices (MIFA) with a part of the variance-reduced
  correction (CA2FL); the step follows from how much updates change as the model moves;
- late updates are compensated by gradient inversion, absent devices by surrogates (FedDC), as long
  as the device's next update shows that this is nearer to it.
Sub-models, privacy and personalisation come from the config, as for every strategy.
"""

from latecomer.core.strategy import Strategy, no_compensation
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.measured_step import MeasuredStep
from latecomer.strategies.options import Count, NotNegative, Proportion
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

MIN_RATIO = 5.0  # an update is late if it is this many times as stale as the mean
MAX_MISFIT = 0.5  # of an estimate that is used: relative L1 error at the update it explains
# After compensation has ended, updates this many times as stale as the validated ones are still
# compensated.
EXEMPTION = 2.0


@recipe(
    "latecomer",
    "averages cached updates with a measured step, compensates late ones",
    "MIFA, CA2FL, FedDC",
)
def latecomer(
    share: Proportion = 0.1,
    compensate: bool = True,
    surrogates: bool = True,
    server_gflops: NotNegative = 10.0,
    samples: Count = 32,
    iterations: Count = 40,
    save_estimates: bool = True,
) -> Strategy:
    """Options:

    share: updates per commit, as a share of the number of devices, at least one.
    compensate: replace updates at least 5 times as stale as the mean by estimates.
    surrogates: while a late device works on a task, replace its outdated cached update by an
        estimate; needs `compensate`.
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    samples: examples per inversion.
    iterations: optimiser steps per inversion.
    save_estimates: keep inverted examples in checkpoints; without, a resume starts inversions cold.
    """
    weigh = by_examples()
    compensator = InversionCompensator(
        Effort(samples, iterations=iterations),
        switch=SwitchOff(exemption=EXEMPTION),
        min_ratio=MIN_RATIO,
        max_misfit=MAX_MISFIT,
        gflops=server_gflops,
        keep_estimates=save_estimates,
    )
    absent = SurrogateUpdates(compensator, weigh) if compensate and surrogates else None
    return Strategy(
        name="latecomer",
        compensate=compensator if compensate else no_compensation,
        weigh=weigh,
        merge=CachedAggregation(share, MeasuredStep(), absent),
    )

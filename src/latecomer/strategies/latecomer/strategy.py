"""The default strategy: cached aggregation with a measured step, and compensation of late updates.

Parts and the papers they come from:
- every commit steps by the mean of the cached updates of all devices (MIFA) plus 0.3 times the
  variance-reduced correction (CA2FL); the length of the step is computed from how much the mean
  update changes as the model moves (ours);
- late updates are replaced by estimates from gradient inversion (FedDC), until most devices' next
  updates show that the estimates have larger errors than the late updates themselves;
- outdated cached updates of late devices are replaced by surrogates (ours), unless the device's
  next update showed that a delta of 0 would have had a smaller error.
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

    share: updates per commit, as a share of the number of devices, rounded up, at most 10.
    compensate: replace updates at least 5 times as stale as the mean of the others by estimates.
    surrogates: while a device whose updates were late works on a task, replace its cached update
        that is older than a fleet pass by an estimate; needs `compensate`.
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    samples: examples per inversion.
    iterations: optimiser steps of a device's first inversion; later ones start from its last
        examples and take 8.
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

"""The default strategy: cached aggregation with a measured step, and parts for late devices.

Parts and the papers they come from:
- every commit averages the cached updates of all devices (MIFA) with a part of the variance-reduced
  correction (CA2FL); the step follows from how much updates change as the model moves;
- late updates are compensated by gradient inversion, absent devices by surrogates (FedDC), as long
  as the device's next update shows that this is nearer to it;
- devices with contradicting data get cluster models (EchoPFL);
- the output bias is calibrated for classes that few devices hold.
Sub-models, privacy and personalisation come from the config, as for every strategy.
"""

from dataclasses import replace

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Strategy, no_compensation, same_lineage
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.calibration import Calibration
from latecomer.strategies.latecomer.measured_step import MeasuredStep
from latecomer.strategies.options import Count, NotNegative, Proportion
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.dispatching import ClusterDispatch
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

MIN_RATIO = 5.0  # an update is late if it is this many times as stale as the mean
# After compensation has ended, updates this many times as stale as the validated ones are still
# compensated.
EXEMPTION = 2.0
PASSES_BETWEEN_REVIEWS = 3.0  # uploads per member between two reviews of a cluster
FEEDBACK_EVERY = 3  # tasks of a device between two reports
MIN_UPLOADS = 20  # between two reviews, in small clusters
HIGH_ERROR = 0.4  # error rate on a device's own data above which its cluster does not fit it


@recipe(
    "latecomer",
    "averages cached updates with a measured step, compensates late ones, clusters devices",
    "FedDC, MIFA, CA2FL, EchoPFL, PrivaAsyncFed",
)
def latecomer(
    share: Proportion = 0.1,
    clusters: Count = 4,
    compensate: bool = True,
    surrogates: bool = True,
    calibrate: Proportion = 1.0,
    server_gflops: NotNegative = 10.0,
    samples: Count = 32,
    iterations: Count = 40,
    save_estimates: bool = True,
) -> Strategy:
    """Options:

    share: devices that report per commit, as a share of the devices of a lineage, at least three.
    clusters: largest number of cluster models; 1: one model for all.
    compensate: replace updates at least 5 times as stale as the mean by estimates.
    surrogates: while a late device works on a task, replace its outdated cached update by an
        estimate; needs `compensate`.
    calibrate: strength of the output-bias calibration for classes that few devices hold.
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    samples: examples per inversion.
    iterations: optimiser steps per inversion.
    save_estimates: keep inverted examples in checkpoints; without, a resume starts inversions cold.
    """
    weigh = by_examples()
    effort = Effort(samples, iterations=iterations)
    compensator = _compensator(effort, server_gflops, save_estimates) if compensate else None
    absent = SurrogateUpdates(compensator, weigh) if compensator and surrogates else None
    # Calibration uses the reports of devices that clustering keeps.
    clustering = _clustering(clusters) if clusters > 1 or calibrate else None
    calibration = Calibration(calibrate, clustering) if clustering and calibrate else None
    return Strategy(
        name="latecomer",
        route=clustering or same_lineage,
        compensate=compensator or no_compensation,
        weigh=weigh,
        merge=CachedAggregation(share, MeasuredStep(), absent),
        dispatch=ClusterDispatch(clustering),
        observers=(calibration,) if calibration else (),
        prepare=_with_feedback_settings,
        personal=clusters > 1,
    )


def _compensator(effort: Effort, gflops: float, save_estimates: bool) -> InversionCompensator:
    return InversionCompensator(
        effort,
        switch=SwitchOff(exemption=EXEMPTION),
        min_ratio=MIN_RATIO,
        gflops=gflops,
        keep_estimates=save_estimates,
    )


def _clustering(max_clusters: int) -> Clustering:
    return Clustering(
        initial=1,
        max_clusters=max_clusters,
        every=MIN_UPLOADS,
        need=HIGH_ERROR,
        partial=False,
        passes=PASSES_BETWEEN_REVIEWS,
        feedback_every=FEEDBACK_EVERY,
    )


def _with_feedback_settings(spec: TrainSpec) -> TrainSpec:
    # Examples are scarce, so devices report the error on those they train on; and corrected for
    # their class prior, so that a device with few classes is not taken for one with a high error.
    return replace(spec, hold_back=False, prior_correction=True)

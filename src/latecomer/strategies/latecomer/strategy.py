"""The default strategy: cached aggregation with staleness compensation, clusters and calibration.

Parts and the papers they come from; several switch themselves on and off by measurements:
- late updates are compensated by gradient inversion, absent devices by surrogates (FedDC);
- every commit averages the cached updates of all devices, with variance reduction (MIFA, CA2FL);
- devices with contradicting data get cluster models, stragglers a mid-task push (EchoPFL);
- sub-models and privacy come from the config (PrivaAsyncFed);
- the output bias is calibrated, and each device personalises the model it deploys.
"""

from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Observer, Strategy, no_compensation, same_lineage
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.calibration import Calibration
from latecomer.strategies.latecomer.measured_step import MeasuredStep
from latecomer.strategies.latecomer.mid_task_push import MidTaskPush
from latecomer.strategies.latecomer.model_averaging import ModelAveraging
from latecomer.strategies.latecomer.personalisation import Personalisation
from latecomer.strategies.options import Count, NotNegative, Positive, Proportion
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.dispatching import ClusterDispatch
from latecomer.strategies.parts.inversion import Effort
from latecomer.strategies.parts.surrogates import SurrogateUpdates
from latecomer.strategies.parts.switch_off import SwitchOff
from latecomer.strategies.parts.weighting import by_examples
from latecomer.strategies.recipe import recipe

MIN_RATIO = 5.0  # an update is late if it is this many times as stale as the mean
PASSES_BETWEEN_REVIEWS = 3.0  # uploads per member between two reviews of a cluster
FEEDBACK_EVERY = 3  # tasks of a device between two reports
MIN_UPLOADS = 20  # between two reviews, in small clusters
HIGH_ERROR = 0.4  # error rate on a device's own data above which its cluster does not fit it


class Advanced(BaseModel):
    """Settings that were chosen by measurement (docs/studies/flagship.md) and seldom need a change.

    wait: a device waits for a new model of its lineage before its next task, unless no device of
        the lineage is working.
    server_lr: step per fleet pass, in units of the mean cached update.
    norm_clip: clip cached updates to this times their median RMS; 0: no clipping.
    age_discount: exponent of the discount of cached updates older than a fleet pass; 0: none.
    control_variate: share of the variance-reduced correction, 0 (MIFA) to 1 (CA2FL).
    trust_region: largest displacement per fleet pass, in median update RMS; 0: no bound.
    projection_damping: share of the movement along a cached update taken off it, 0 to 1.
    exemption: after compensation has ended, updates at least this many times as stale as the
        validated ones are still compensated; 0: none.
    interpolation: largest share of its last local update that a device adds to its model, 0 to 1.
    prior_correction: strength of the class-prior correction on devices, 0 to 1.
    averaging: deploy the average of the last models where most devices add privacy noise.
    samples: examples per inversion.
    iterations: optimiser steps per inversion.
    save_estimates: keep inverted examples in checkpoints; without, a resume starts inversions cold.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    wait: bool = False
    server_lr: Positive = 2.0
    norm_clip: NotNegative = 2.0
    age_discount: NotNegative = 0.5
    control_variate: Proportion = 1.0
    max_gain: NotNegative = 30.0
    correction: NotNegative = 0.3
    projection_damping: Proportion = 1.0
    exemption: NotNegative = 2.0
    interpolation: Proportion = 1.0
    prior_correction: Proportion = 1.0
    averaging: bool = True
    samples: Count = 32
    iterations: Count = 40
    save_estimates: bool = True


@recipe(
    "latecomer",
    "averages cached updates, compensates late ones, clusters devices with different data",
    "FedDC, MIFA, CA2FL, EchoPFL, PrivaAsyncFed",
)
def latecomer(
    share: Proportion = 0.1,
    clusters: Count = 4,
    compensate: bool = True,
    surrogates: bool = True,
    push: bool = True,
    personalise: bool = True,
    calibrate: Proportion = 1.0,
    server_gflops: NotNegative = 10.0,
    advanced: Advanced = Advanced(),  # noqa: B008 (frozen)
) -> Strategy:
    """Options:

    share: updates per commit, as a share of the devices of a lineage; 0: every update makes one.
    clusters: largest number of cluster models; 1: one model for all.
    compensate: replace updates at least 5 times as stale as the mean by estimates.
    surrogates: while a late device works on a task, replace its outdated cached update by an
        estimate; needs `compensate`.
    push: send new models to stragglers while they train; no effect with one local epoch.
    personalise: devices adapt the model to their class prior and their last local update.
    calibrate: strength of the output-bias calibration for classes that few devices hold.
    server_gflops: speed of the server, for the virtual time of inversions; 0: they take none.
    advanced: see `Advanced`.
    """
    weigh = by_examples()
    compensator = _compensator(advanced, server_gflops) if compensate else None
    absent = SurrogateUpdates(compensator, weigh) if compensator and surrogates else None
    interpolation = advanced.interpolation if personalise else 0.0
    prior_correction = advanced.prior_correction if personalise else 0.0
    # The reports of devices that clustering keeps serve calibration and personalisation too.
    reports = bool(interpolation or prior_correction or calibrate)
    clustering = _clustering(clusters) if clusters > 1 or reports else None
    observers: list[Observer] = [MidTaskPush(behind=_fleet_pass(share))] if push else []
    if reports or advanced.averaging:
        averaging = ModelAveraging() if advanced.averaging else None
        calibration = Calibration(calibrate, clustering) if clustering else None
        serving = Personalisation(interpolation, prior_correction, calibration, averaging)
        observers += [part for part in (averaging, serving, calibration) if part]
    return Strategy(
        name="latecomer",
        route=clustering or same_lineage,
        compensate=compensator or no_compensation,
        weigh=weigh,
        merge=CachedAggregation(share, MeasuredStep(advanced.max_gain), absent),
        dispatch=ClusterDispatch(clustering, advanced.wait),
        observers=tuple(observers),
        prepare=_with_feedback_settings,
        personal=clusters > 1,
    )


def _compensator(advanced: Advanced, gflops: float) -> InversionCompensator:
    # With `wait` devices start at a commit, so every stale update is late.
    return InversionCompensator(
        Effort(advanced.samples, iterations=advanced.iterations),
        switch=SwitchOff(exemption=advanced.exemption),
        min_ratio=0.0 if advanced.wait else MIN_RATIO,
        gflops=gflops,
        keep_estimates=advanced.save_estimates,
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


def _fleet_pass(share: float) -> int:
    """Nominal length of a fleet pass in commits, for one lineage: 1 / share, at least 2."""
    return max(2, round(1 / share)) if share else 100


def _with_feedback_settings(spec: TrainSpec) -> TrainSpec:
    # Examples are scarce, so devices report the error on those they train on; and corrected for
    # their class prior, so that a device with few classes is not taken for one with a high error.
    return replace(spec, hold_back=False, prior_correction=1.0)

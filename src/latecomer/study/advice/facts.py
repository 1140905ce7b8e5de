"""The numbers that advice is based on: a scenario and, if there is one, its finished run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    """Local differential privacy; epsilons are totals over the planned tasks of a device."""

    nominal: float  # `privacy.epsilon` of the config
    whole_run: bool  # whether `nominal` is for all releases of a run together
    limit: float  # epsilon that a device may spend; 0: no limit
    spent_mean: float  # by a device with the mean number of tasks
    spent_max: float  # by the device with most tasks
    allowed: float  # tasks that fit the limit; inf without one
    planned_mean: float  # tasks per device if no device retires
    planned_max: float
    poisson: bool
    full_batches: bool


@dataclass(frozen=True)
class Scenario:
    """Data, fleet and lateness before anything is trained.

    Ages are those of arriving updates in a dry run: every device gets its next task at once and
    nothing is trained. A fleet pass is as many arriving updates as there are devices. Stragglers
    are the devices of `fleet.late`; without any, the devices whose updates never arrive or are far
    staler than the median.
    """

    devices: int  # with data
    examples: float  # per device, median
    epochs: float  # nominal epochs until the end of the run
    # data
    skew: float = 0.0  # label skew: 0 = as in random partitions, 1 = one class per device
    concept_shift: bool = False  # the same inputs get other labels on some devices
    drift: str = "none"
    # fleet
    speed_ratio: float = 1.0  # nominal task time, 90th over 10th percentile of the devices
    jitter: float = 0.0  # median
    transfer: float = 0.0  # share of a task's time spent on links, median
    update_bytes: int = 0
    narrow: float = 0.0  # share of devices that train a sub-model
    offline: float = 0.0  # share of device time offline
    without_update: float = 0.0  # share of devices without an update in the dry run
    lost: float = 0.0  # share of tasks that are lost
    # lateness
    late: int = 0  # devices of `fleet.late`
    busy: bool = False  # `fleet.late.kind` is busy
    stragglers: int = 0
    age: float = 0.0  # mean age of updates in epochs
    straggler_age: float = 0.0  # the length of the dry run if no straggler sent an update
    passes: float = 0.0  # mean fleet passes between dispatch and arrival of an update
    straggler_passes: float = 0.0
    first_update_after: float = 0.0  # share of the run until 90% of the stragglers sent an update
    straggler_share: float = 0.0  # of all examples
    straggler_classes: Mapping[str, float] = field(default_factory=dict)  # class -> share they hold
    # server
    server_load: float = 0.0  # merging time over run time
    budget: Budget | None = None


@dataclass(frozen=True)
class Run:
    """Results of a finished run; None: nothing to measure it on. `local` is local test accuracy."""

    strategy: str
    lr: float
    chance: float  # accuracy of guessing
    accuracy: float  # mean of the last fifth of the run
    dip: float  # largest drop below the best accuracy so far, in the second half
    gain: float  # mean accuracy of the last tenth minus that around 70% of the run
    local_mean: float | None = None
    local_worst: float | None = None
    local_late: float | None = None  # late devices
    local_others: float | None = None  # devices that are not late
    local_rare: float | None = None  # the fifth of the devices with fewest updates
    local_frequent: float | None = None  # all others
    refused: float = 0.0  # share of updates
    dropped: float = 0.0
    idle: float = 0.0  # share of device time without a task
    staleness_mean: float = 0.0  # in commits
    staleness_p90: int = 0
    staleness_max: int = 0
    late_updates: float | None = None  # share of the accepted updates that late devices sent
    late_weight: float | None = None  # share of the total weight of these updates
    retired: float = 0.0  # share of devices
    compensated: int | None = None  # updates; None: a strategy without compensation
    compensation_load: float = 0.0  # server seconds over virtual seconds
    compensation_better: float | None = None  # share of validations with a reduced error
    switched_after: float | None = None  # share of the commits
    clusters: int | None = None
    megabytes_up: float = 0.0


@dataclass(frozen=True)
class ComparisonOutcome:
    """The best strategy of a finished comparison, and its margin over the second in accuracy."""

    winner: str
    second: str  # empty: there was one strategy only
    margin: float
    spread: float | None  # None: one seed
    seeds: int


@dataclass(frozen=True)
class Facts:
    """Everything known about a subject; a part that is not available is None."""

    scenario: Scenario | None = None
    run: Run | None = None
    comparison: ComparisonOutcome | None = None
    strategy: str = ""  # of the config
    lr: float = 0.01
    devices: int = 0
    tuned: Mapping[str, float] = field(default_factory=dict)  # strategy -> lr in [compare.NAME]

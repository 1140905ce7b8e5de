"""The numbers that advice is based on: a scenario and, if there is one, its finished run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from latecomer.study.learning_rate import RateProblem


@dataclass(frozen=True)
class Budget:
    """Local differential privacy; epsilons are totals over the planned tasks of a device."""

    whole_run: bool  # whether `privacy.epsilon` is for all releases of a run together
    limit: float  # epsilon that a device may spend; 0: no limit
    spent_mean: float  # by a device with the mean number of tasks
    spent_max: float  # by the device with most tasks
    tasks_mean: float  # tasks per device if no device retires
    tasks_max: float


@dataclass(frozen=True)
class Scenario:
    """Data, fleet and lateness before anything is trained.

    Ages are those of arriving updates in a dry run: every device gets its next task at once and
    nothing is trained. Stragglers are the devices of `fleet.late`; without any, the devices whose
    updates never arrive or are far older than the median.
    """

    devices: int  # with data
    examples: float  # per device, median
    epochs: float  # nominal epochs until the end of the run
    dry_updates: int = 0  # updates in the dry run
    skew: float = 0.0  # label skew: 0 = as in random partitions, 1 = one class per device
    drift: str = "none"  # `data.drift.kind`
    concept_shift: bool = False  # the drift gives the same inputs other labels on some devices
    speed_ratio: float = 1.0  # nominal task time, 90th over 10th percentile of the devices
    transfer: float = 0.0  # share of a task's time spent on links, median
    update_bytes: int = 0
    offline: float = 0.0  # share of device time offline
    without_update: float = 0.0  # share of devices without an update in the dry run
    lost: float = 0.0  # share of tasks that are lost
    late: int = 0  # devices of `fleet.late`
    busy: bool = False  # `fleet.late.kind` is busy
    stragglers: int = 0
    age: float = 0.0  # mean age of updates in epochs
    straggler_age: float = 0.0  # the length of the dry run if no straggler sent an update
    first_update_after: float = 0.0  # share of the run until 90% of the stragglers sent an update
    straggler_share: float = 0.0  # of all examples
    straggler_classes: Mapping[str, float] = field(default_factory=dict)  # class -> share they hold
    server_load: float = 0.0  # merging time of the arriving updates over run time
    budget: Budget | None = None


@dataclass(frozen=True)
class Run:
    """Results of a finished run; None: nothing to measure it on. `local` is local test accuracy."""

    strategy: str
    lr: float
    accuracy: float  # mean of the last fifth of the run
    dip: float = 0.0  # largest drop below the best accuracy so far, in the second half
    gain: float = 0.0  # mean accuracy of the last tenth minus that around 70% of the run
    rate: RateProblem | None = None  # the loss says that the learning rate is wrong
    local: float | None = None  # mean
    late_are: str = "Late devices"  # or, without any, the fifth of the devices with fewest updates
    local_late: float | None = None
    local_others: float | None = None
    dropped: float = 0.0  # share of tasks that failed or whose updates the strategy rejected
    idle: float = 0.0  # share of device time online and without a task
    staleness: float = 0.0  # mean, in commits
    retired: float = 0.0  # share of devices whose privacy budget is spent
    megabytes_up: float = 0.0


@dataclass(frozen=True)
class Measured:
    """Accuracy of a strategy in a comparison: mean and standard deviation over its seeds."""

    strategy: str
    accuracy: float
    spread: float  # nan: one seed
    seeds: int


@dataclass(frozen=True)
class Facts:
    """Everything known about a subject; a part that is not available is None or empty."""

    scenario: Scenario | None = None
    run: Run | None = None
    comparison: tuple[Measured, ...] = ()  # strategies of a comparison, best first
    strategy: str = ""  # `strategy.name`
    lr: float = 0.01  # `training.lr`
    local_epochs: int = 1  # `training.local_epochs`

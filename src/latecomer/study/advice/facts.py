"""What advice is given from: plain numbers about a scenario and, if there was one, its run."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    """Local privacy in numbers. Epsilons are totals over the planned tasks, by the accountant."""

    nominal: float  # as the config prints it
    whole_run: bool  # whether that is meant for all releases together
    limit: float  # what a device may spend; 0 = no limit
    spent_mean: float  # by a device with as many tasks as the average one
    spent_most: float  # by the busiest device
    allowed: float  # tasks that fit the limit, inf without one
    planned_mean: float  # tasks per device if nobody retires
    planned_most: float
    poisson: bool
    full_batches: bool


@dataclass(frozen=True)
class Scenario:
    """The devices and their data before anything is trained.

    A turn is as many arriving updates as there are devices. Ages are those of arriving updates in
    a rehearsal of the fleet: every device gets its next task at once, and nothing is trained.
    """

    devices: int  # with data
    examples: float  # per device, the median
    epochs: float  # nominal ones, until the run's bound
    # data
    skew: float = 0.0  # label mixes: 0 = as alike as chance makes them, 1 = one class each
    contradicts: bool = False  # the same inputs get other labels on some devices
    drift: str = "none"
    # fleet
    speed_ratio: float = 1.0  # nominal task time, ninth tenth over first tenth of the devices
    jitter: float = 0.0  # the median
    transfer: float = 0.0  # share of a task that goes over links, the median
    update_bytes: int = 0
    narrow: float = 0.0  # share of devices that carry a part of the model only
    away: float = 0.0  # share of time that devices are out of reach
    unheard: float = 0.0  # share of devices never heard in the rehearsal
    lost: float = 0.0  # share of tasks that end in nothing
    # lateness
    late: int = 0  # devices that `fleet.late` names
    busy: bool = False  # they are away meanwhile
    behind: int = 0  # these, or else those whose updates are far older than usual
    age: float = 0.0  # mean age of updates in epochs
    age_behind: float = 0.0  # the same of those behind; the epochs rehearsed if never heard
    turns: float = 0.0
    turns_behind: float = 0.0
    heard_after: float = 0.0  # share of the run after which nine tenths of them were heard once
    behind_share: float = 0.0  # of all examples
    tied: Mapping[str, float] = field(default_factory=dict)  # class -> share on those behind
    # server
    server_load: float = 0.0  # its merging time over the run's
    budget: Budget | None = None


@dataclass(frozen=True)
class Run:
    """What a finished run tells of itself. None: there was nothing to measure it on."""

    strategy: str
    lr: float
    chance: float  # accuracy of guessing
    accuracy: float  # mean of the last fifth
    dip: float  # the deepest fall below what was reached before, in the second half
    gain: float  # last tenth against the tenth before the last quarter
    own_mean: float | None = None
    own_worst: float | None = None
    own_late: float | None = None
    own_others: float | None = None  # of those not late
    own_rare: float | None = None  # of the fifth heard least often
    own_frequent: float | None = None  # of all others
    refused: float = 0.0  # share of answers
    dropped: float = 0.0
    waiting: float = 0.0  # share of the devices' time without a task
    staleness_mean: float = 0.0  # in commits
    staleness_most: int = 0  # of nine tenths of the updates
    staleness_max: int = 0
    late_updates: float | None = None  # share of the accepted ones that late devices sent
    late_weight: float | None = None  # share of all weight that they were given
    retired: float = 0.0  # share of devices
    repairs: int | None = None  # None: the strategy repairs nothing
    repairing: float = 0.0  # its seconds of the server over virtual seconds
    repairs_right: float | None = None  # share of judgements in favour of the estimate
    switched_after: float | None = None  # share of the commits
    clusters: int | None = None
    megabytes_up: float = 0.0


@dataclass(frozen=True)
class Contest:
    """The outcome of a comparison that was already there."""

    winner: str
    second: str  # empty: there was nobody else
    margin: float
    spread: float | None  # None: one seed
    seeds: int


@dataclass(frozen=True)
class Facts:
    """Everything known; a part that could not be had is None."""

    scenario: Scenario | None = None
    run: Run | None = None
    contest: Contest | None = None
    strategy: str = ""  # of the config
    lr: float = 0.01
    devices: int = 0
    tuned: Mapping[str, float] = field(default_factory=dict)  # strategy -> lr in [compare.NAME]

"""A dry run of a fleet: when updates arrive if every device works and nothing is trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from latecomer.core.messages import Task, Update
from latecomer.core.outcomes import Accepted, Dispatched, Dropped, Logged
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.client import Rebases
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import Fleet
from latecomer.study.experiment import Experiment

MAX_UPDATES = 20_000  # enough for stable statistics within a few seconds
ONE_FLOAT = 4  # bytes of the model in the dry run


@dataclass(frozen=True)
class Arrivals:
    """The updates of a run in order of arrival; times in virtual seconds."""

    device: NDArray[np.int64]
    sent: NDArray[np.float64]
    arrived: NDArray[np.float64]
    lost: int  # tasks
    seconds: float  # of the whole run


class NoTraining(OneByOne):
    """A trainer that returns zero updates."""

    def __init__(self, passes: Sequence[float]) -> None:
        super().__init__({})
        self.passes = passes

    def examples(self, task: Task) -> float:
        return self.passes[task.device]

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        return Update(task.id, torch.zeros_like(task.params), 1)

    def expect(self, task: Task, arrives: float) -> None: ...

    def renew(self, task: Task) -> bool:
        return False


def dry_run(experiment: Experiment, max_updates: int = MAX_UPDATES) -> Arrivals:
    """Arrivals up to the run's bound or `max_updates`, if each device is redispatched at once."""
    strategy = Strategy(name="dry-run")
    open_tasks: dict[int, float] = {}  # task -> time sent
    arrivals: list[tuple[int, float, float]] = []  # device, time sent, time of arrival
    lost, now = 0, 0.0

    def take(time: float, outcome: Logged) -> None:
        nonlocal lost, now
        now = time
        match outcome:
            case Dispatched(task=task):
                open_tasks[task] = time
            case Accepted(device=device, task=task):
                arrivals.append((device, open_tasks.pop(task), time))
            case Dropped(task=task):
                lost += open_tasks.pop(task, None) is not None

    loads = loads_of(experiment)
    engine = VirtualEngine(
        Server(torch.zeros(1), strategy, experiment.spec, seed=experiment.config.seed),
        _for_one_float(experiment.fleet, [load.size for load in loads]),
        NoTraining([load.passes for load in loads]),
        [d for d, client in enumerate(experiment.federation.clients) if len(client.train.y)],
        on_note=take,
    )
    bounds = experiment.bounds(strategy)
    updates = min(bounds.updates or max_updates, max_updates)
    # The second bound counts lost tasks too: if all are lost, no update ever arrives.
    engine.run(
        Bounds(updates, 0, bounds.virtual_seconds), lambda: len(arrivals) + lost < max_updates
    )
    columns = np.array(arrivals, dtype=float).reshape(-1, 3).T
    return Arrivals(columns[0].astype(np.int64), columns[1], columns[2], lost, now)


@dataclass(frozen=True)
class Load:
    """The cost of a task on a device."""

    size: int  # bytes, each way
    passes: float  # training examples x local epochs x relative work of the sub-model


def loads_of(experiment: Experiment) -> list[Load]:
    """The load of each device; `passes` is 0 for devices without data."""
    networks, spec = experiment.networks, experiment.spec
    declared = experiment.config.submodels.level == "declared"
    found = []
    for device, client in enumerate(experiment.federation.clients):
        width = experiment.levels[device] if declared else 1.0
        submodel = networks.submodels[width]
        network = networks(submodel) or experiment.model
        trained = spec.epoch_examples(len(client.train.y)) * spec.local_epochs
        passes = trained * networks.work(submodel)
        found.append(Load(4 * network.layout.size, passes))
    return found


def _for_one_float(fleet: Fleet, sizes: Sequence[int]) -> Fleet:
    """The fleet with links slowed down so that one float takes as long as the model does."""
    devices = tuple(
        replace(d, down=d.down * ONE_FLOAT / size, up=d.up * ONE_FLOAT / size)
        for d, size in zip(fleet.devices, sizes, strict=True)
    )
    return replace(fleet, devices=devices)

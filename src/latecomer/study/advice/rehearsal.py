"""A fleet's run without any training: who answers when, and how much has arrived meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latecomer.core.messages import Note, Task, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.client import Rebases
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import Fleet
from latecomer.study.experiment import Experiment
from latecomer.study.view.history import End, History

# As many arrivals tell what a fleet is like; more would take longer than a person wants to wait.
MAX_UPDATES = 20_000
ONE_FLOAT = 4  # bytes of the model that is sent around


@dataclass(frozen=True)
class Arrivals:
    """The updates of a run in the order they came, and who lost a task."""

    device: NDArray[np.int64]
    sent: NDArray[np.float64]
    came: NDArray[np.float64]
    lost: int
    seconds: float

    @classmethod
    def of(cls, history: History) -> "Arrivals":
        tasks = history.tasks
        end, came = np.array(tasks.end), np.array(tasks.ended)
        arrived = end == End.ARRIVED
        order = np.argsort(came[arrived], kind="stable")
        device, sent = np.array(tasks.device, dtype=np.int64), np.array(tasks.sent)
        return cls(
            device[arrived][order],
            sent[arrived][order],
            came[arrived][order],
            int((end == End.LOST).sum()),
            history.now,
        )

    def meanwhile(self) -> NDArray[np.float64]:
        """How many other updates came between the dispatch and the arrival of each."""
        before = np.searchsorted(self.came, self.came, side="left")
        return (before - np.searchsorted(self.came, self.sent, side="right")).clip(0).astype(float)


class Idle:
    """A trainer that returns at once and has learned nothing."""

    def __init__(self, passes: Sequence[float]) -> None:
        self.passes = passes

    def examples(self, task: Task) -> float:
        return self.passes[task.device]

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        return Update(task.id, torch.zeros_like(task.params), 1)

    def expect(self, task: Task, arrives: float) -> None: ...
    def forget(self, task_id: int) -> None: ...

    def renew(self, task: Task) -> bool:
        return False

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


def rehearse(experiment: Experiment, most: int = MAX_UPDATES) -> Arrivals:
    """The run of this fleet under an at-once dispatch, to the run's bound or `most` updates."""
    strategy, history = Strategy(name="rehearsal"), History()

    def note(time: float, told: Note) -> None:
        history.take({"time": time, "event": told.kind, **told.fields})

    loads = loads_of(experiment)
    engine = VirtualEngine(
        Server(torch.zeros(1), strategy, experiment.spec, seed=experiment.config.seed),
        _for_one_float(experiment.fleet, [load.size for load in loads]),
        Idle([load.passes for load in loads]),
        [d for d, client in enumerate(experiment.federation.clients) if len(client.train.y)],
        on_note=note,
    )
    bounds = experiment.bounds(strategy)
    updates = min(bounds.updates or most, most)
    # Where every task is lost there is never an update.
    engine.run(Bounds(updates, 0, bounds.virtual_seconds), lambda: len(history.tasks) < most)
    return Arrivals.of(history)


@dataclass(frozen=True)
class Load:
    """What a task means to a device."""

    width: float  # of the model it carries at first
    size: int  # bytes, each way
    passes: float  # examples it goes through, counted by the work of the whole model


def loads_of(experiment: Experiment) -> list[Load]:
    """For each device; those without data have nothing to go through."""
    networks, epochs = experiment.networks, experiment.spec.local_epochs
    declared = experiment.config.submodels.level == "declared"
    found = []
    for device, client in enumerate(experiment.federation.clients):
        width = experiment.levels[device] if declared else 1.0
        submodel = networks.submodels[width]
        network = networks(submodel) or experiment.model
        passes = len(client.train.y) * epochs * networks.work(submodel)
        found.append(Load(width, 4 * network.layout.size, passes))
    return found


def _for_one_float(fleet: Fleet, sizes: Sequence[int]) -> Fleet:
    """Links so much slower that a single float takes as long on them as the model does."""
    devices = tuple(
        replace(d, down=d.down * ONE_FLOAT / size, up=d.up * ONE_FLOAT / size)
        for d, size in zip(fleet.devices, sizes, strict=True)
    )
    return replace(fleet, devices=devices)

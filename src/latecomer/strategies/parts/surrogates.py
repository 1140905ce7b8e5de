"""Surrogate updates: estimates for late devices that still work on a task when a commit is made.

Ours: the papers only compensate updates that arrive. The server has examples that reproduce an
update of the device. Training the current model on them gives an estimate of the update that the
device would send, which has the weight of the device's own update.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, Task, Update
from latecomer.core.strategy import ServerView, Weigh
from latecomer.core.submodel import name_of, take
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.compensation import InversionCompensator
from latecomer.strategies.parts.inversion import grouped, replay_each

# A task open for more than this many times the device's last staleness gets no surrogate.
MAX_ABSENCE = 2


@dataclass(frozen=True)
class SurrogateUpdates:
    """Makes contributions for late devices that work on a task and have no recent update.

    Late devices are those with a compensated update (`InversionCompensator.last`). The last
    validation of a device decides by the smallest error: the estimate (also if there was no
    validation), its last delta, or 0, for which no contribution is made. Where compensation has
    ended, it is gamma * estimate + (1 - gamma) * last delta. A task open for more than
    `MAX_ABSENCE` times the staleness of the device's last update gets no contribution.
    """

    compensator: InversionCompensator
    weigh: Weigh

    def __call__(
        self, lineage: str, with_update: Iterable[int], view: ServerView
    ) -> list[Contribution]:
        """One weighed contribution per working late device that is not in `with_update`.

        `with_update` are the devices whose own update is used.
        """
        here = set(with_update)
        tasks = [
            view.open_tasks[view.working[device]]
            for device in self.compensator.last
            if device in view.working and device not in here
        ]
        tasks = [task for task in tasks if self._is_due(task, lineage, view)]
        head = view.store.head_params(lineage)
        bases = [take(head, task.submodel) for task in tasks]
        deltas = self._deltas(tasks, bases, lineage, view)
        return [
            self._contribution(task, base, delta, noise, lineage, view)
            for task, (base, delta, noise) in zip(tasks, deltas, strict=True)
            if torch.isfinite(delta).all()
        ]

    def _is_due(self, task: Task, lineage: str, view: ServerView) -> bool:
        last = self.compensator.last[task.device]
        return (
            view.store.resolve(task.lineage) == lineage
            and view.store.staleness(task.version, lineage) <= MAX_ABSENCE * last.staleness
            and self.compensator.validation.nearest.get(task.device) != "zero"
            and last.delta.numel() == task.params.numel()
        )

    def _deltas(
        self, tasks: list[Task], bases: list[Tensor], lineage: str, view: ServerView
    ) -> list[tuple[Tensor, Tensor, float]]:
        """Base, delta and noise of each surrogate; a device's last delta has an old base."""
        validation, now = self.compensator.validation, view.store.commits
        last = [self.compensator.last[task.device] for task in tasks]
        gammas = [
            0.0
            if validation.nearest.get(task.device) == "stale"
            else validation.switch.gamma(lineage, now, of.staleness)
            for task, of in zip(tasks, last, strict=True)
        ]
        deltas = [(of.base, of.delta, of.noise_std) for of in last]
        replayed = [i for i, gamma in enumerate(gammas) if gamma]
        fresh = self._replays([tasks[i] for i in replayed], [bases[i] for i in replayed], view)
        for i, new in zip(replayed, fresh, strict=True):
            base, delta, noise = deltas[i]
            deltas[i] = (
                torch.lerp(base, bases[i], gammas[i]),
                torch.lerp(delta, new, gammas[i]),
                (1.0 - gammas[i]) * noise,
            )
        return deltas

    def _replays(self, tasks: list[Task], bases: list[Tensor], view: ServerView) -> list[Tensor]:
        """The deltas of training each base on its device's estimated examples."""
        deltas = list(bases)
        names = [name_of(task.submodel) for task in tasks]
        for places in grouped(names):
            model = cast(FlatModel, view.network(tasks[places[0]].submodel))
            estimates = [self.compensator.last[tasks[i].device].estimate for i in places]
            found = replay_each(model, [bases[i] for i in places], estimates)
            for i, delta in zip(places, found, strict=True):
                deltas[i] = delta
        return deltas

    def _contribution(
        self, task: Task, base: Tensor, delta: Tensor, noise: float, lineage: str, view: ServerView
    ) -> Contribution:
        count = self.compensator.last[task.device].num_examples
        update = Update(task.id, delta, count, noise_std=noise)
        surrogate = Contribution(task, update, base, delta, lineage, staleness=0)
        return surrogate.weighed(float(self.weigh(surrogate, view)))

"""Stand-ins: while a known device is away, its examples speak for it in every epoch.

Past the papers, which only repair what arrives. The server holds examples that explain the
device's last update; until its own word comes, their replay on the current model counts as much
as the device itself would.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, Task, Update
from latecomer.core.strategy import ServerView, Weigh
from latecomer.core.submodel import take
from latecomer.device.flat import FlatModel
from latecomer.strategies.compensation import Compensator
from latecomer.strategies.inversion import alike, replay_each


@dataclass(frozen=True)
class StandIns:
    """Speaks for devices that work on a task from an older model and have no word in this epoch.

    Not for those whose last estimate was no help once the truth came in, and ever more softly
    when compensation has been switched off.
    """

    compensator: Compensator
    weigh: Weigh

    def __call__(
        self, lineage: str, present: Iterable[int], view: ServerView
    ) -> list[Contribution]:
        judge, known = self.compensator.judge, self.compensator.known
        gamma = judge.switch.gamma(lineage, view.store.commits)
        if not gamma:
            return []
        silent = {*present, *judge.distrusted}
        tasks = [
            view.open_tasks[view.working[device]]
            for device in known
            if device in view.working and device not in silent
        ]
        tasks = [task for task in tasks if self._is_away(task, lineage, view)]
        head = view.store.head_params(lineage)
        bases = [take(head, task.submodel) for task in tasks]
        return [
            self._contribution(task, base, gamma * delta, lineage, view)
            for task, base, delta in zip(
                tasks, bases, self._replays(tasks, bases, view), strict=True
            )
            if torch.isfinite(delta).all()
        ]

    def _is_away(self, task: Task, lineage: str, view: ServerView) -> bool:
        if view.store.resolve(task.lineage) != lineage:
            return False
        return view.store.staleness(task.version, lineage) >= self.compensator.min_staleness

    def _replays(self, tasks: list[Task], bases: list[Tensor], view: ServerView) -> list[Tensor]:
        deltas = list(bases)
        names = [task.submodel.name if task.submodel else "" for task in tasks]
        for places in alike(names):
            model = cast(FlatModel, view.network(tasks[places[0]].submodel))
            estimates = [self.compensator.known[tasks[i].device].estimate for i in places]
            found = replay_each(model, [bases[i] for i in places], estimates)
            for i, delta in zip(places, found, strict=True):
                deltas[i] = delta
        return deltas

    def _contribution(
        self, task: Task, base: Tensor, delta: Tensor, lineage: str, view: ServerView
    ) -> Contribution:
        update = Update(task.id, delta, self.compensator.known[task.device].num_examples)
        stand_in = Contribution(task, update, base, delta, lineage, staleness=0)
        return stand_in.weighed(float(self.weigh(stand_in, view)))

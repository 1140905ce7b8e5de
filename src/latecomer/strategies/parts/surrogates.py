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
from latecomer.core.submodel import name_of, take
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.compensation import Compensator
from latecomer.strategies.parts.inversion import alike, replay_each

# Who is away this many times as long as last time may never come back.
PATIENCE = 2


@dataclass(frozen=True)
class SurrogateUpdates:
    """Speaks for known devices that are at work and have no word in the epoch that closes.

    When the truth came in last, what was nearest to it? If not the estimate, then the device's
    last own word is repeated, or there is silence. Where compensation has been switched off, the
    last word takes over as the estimate fades.
    """

    compensator: Compensator
    weigh: Weigh

    def __call__(
        self, lineage: str, present: Iterable[int], view: ServerView
    ) -> list[Contribution]:
        here = set(present)
        tasks = [
            view.open_tasks[view.working[device]]
            for device in self.compensator.known
            if device in view.working and device not in here
        ]
        tasks = [task for task in tasks if self._speaks(task, lineage, view)]
        head = view.store.head_params(lineage)
        bases = [take(head, task.submodel) for task in tasks]
        words = self._words(tasks, bases, lineage, view)
        return [
            self._contribution(task, base, word, noise, lineage, view)
            for task, (base, word, noise) in zip(tasks, words, strict=True)
            if torch.isfinite(word).all()
        ]

    def _speaks(self, task: Task, lineage: str, view: ServerView) -> bool:
        known = self.compensator.known[task.device]
        return (
            view.store.resolve(task.lineage) == lineage
            and view.store.staleness(task.version, lineage) <= PATIENCE * known.staleness
            and self.compensator.judge.verdicts.get(task.device) != "silence"
            and known.word.numel() == task.params.numel()
        )

    def _words(
        self, tasks: list[Task], bases: list[Tensor], lineage: str, view: ServerView
    ) -> list[tuple[Tensor, Tensor, float]]:
        """Of which model each says what, and with how much noise: its own word is of an old one."""
        judge, now = self.compensator.judge, view.store.commits
        known = [self.compensator.known[task.device] for task in tasks]
        gammas = [
            0.0
            if judge.verdicts.get(task.device) == "word"
            else judge.switch.gamma(lineage, now, of.staleness)
            for task, of in zip(tasks, known, strict=True)
        ]
        words = [(of.base, of.word, of.noise_std) for of in known]
        replayed = [i for i, gamma in enumerate(gammas) if gamma]
        fresh = self._replays([tasks[i] for i in replayed], [bases[i] for i in replayed], view)
        for i, new in zip(replayed, fresh, strict=True):
            base, word, noise = words[i]
            words[i] = (
                torch.lerp(base, bases[i], gammas[i]),
                torch.lerp(word, new, gammas[i]),
                (1.0 - gammas[i]) * noise,
            )
        return words

    def _replays(self, tasks: list[Task], bases: list[Tensor], view: ServerView) -> list[Tensor]:
        deltas = list(bases)
        names = [name_of(task.submodel) for task in tasks]
        for places in alike(names):
            model = cast(FlatModel, view.network(tasks[places[0]].submodel))
            estimates = [self.compensator.known[tasks[i].device].estimate for i in places]
            found = replay_each(model, [bases[i] for i in places], estimates)
            for i, delta in zip(places, found, strict=True):
                deltas[i] = delta
        return deltas

    def _contribution(
        self, task: Task, base: Tensor, delta: Tensor, noise: float, lineage: str, view: ServerView
    ) -> Contribution:
        count = self.compensator.known[task.device].num_examples
        update = Update(task.id, delta, count, noise_std=noise)
        surrogates = Contribution(task, update, base, delta, lineage, staleness=0)
        return surrogates.weighed(float(self.weigh(surrogates, view)))

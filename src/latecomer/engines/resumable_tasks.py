"""Tasks that are done in parts, so that devices hear of newer models while they work.

A node handles one message at a time. When a strategy broadcasts, a task takes one message for each
pass over the device's data, and what has been broadcast meanwhile goes with the next of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from latecomer.core.messages import Task
from latecomer.engines.wire import GoOn, InvalidPayload, Progress


@dataclass(slots=True)
class ResumableTask:
    """How far a task is, as its device has told.

    Newer models have numbers within the task, and names that no other life of the server gives.
    """

    passes: int  # in all
    until: int = 1  # where it was last told to stop
    base: int = 0  # the newer model that it goes from; 0: none
    told: int = 0  # the one it was sent last and has not yet spoken of
    pending: int = 0  # the newest, if it has not been sent
    names: dict[int, str] = field(default_factory=dict)

    @property
    def hears(self) -> bool:
        """Whether there will be another message to it in this task."""
        return self.until < self.passes

    @property
    def usable(self) -> tuple[int, ...]:
        """The newer models that its update may still be from."""
        return tuple(sorted({self.base, self.told, self.pending} - {0}))

    def broadcast(self, number: int, name: str) -> None:
        self.pending, self.names[number] = number, name

    def heard(self, progress: Progress) -> None:
        """Take in what the device says; Refused if it cannot be."""
        if not self.until <= progress.passes < self.passes:
            raise InvalidPayload(f"passes must be {self.until} to {self.passes - 1}")
        if progress.number and self.names.get(progress.number) != progress.name:
            raise InvalidPayload("the update is from a model that this server has not sent")
        self.base, self.told = progress.number, 0
        self.until = progress.passes

    def go_on(self, task: Task, key: str) -> GoOn:
        """The next message: one pass more, from the newest model if there is a newer one."""
        self.until += 1
        if not self.pending:
            return GoOn(key, self.until)
        number, self.told, self.pending = self.pending, self.pending, 0
        newer = (*task.offers, *task.broadcasts)[number - 1]
        if newer is None:
            return GoOn(key, self.until)
        fits = task.offer_of(newer.lineage)
        return GoOn(key, self.until, number, self.names[number], fits, newer.params)

    def state(self) -> list[Any]:
        return [self.passes, self.until, self.base, self.told, self.pending, dict(self.names)]


def restored(state: Sequence[Any]) -> ResumableTask:
    passes, until, base, told, pending, names = state
    return ResumableTask(passes, until, base, told, pending, dict(names))

"""Tasks that take one message per local epoch, so that devices receive newer models meanwhile.

A node handles one message at a time. If a strategy broadcasts, a task takes one message for each
pass over the device's data, and the newest broadcast model travels with the next message.
"""

from dataclasses import dataclass, field

from latecomer.core.messages import Task
from latecomer.engines.wire import InvalidPayload, Progress, ResumeOrder


@dataclass(slots=True)
class ResumableTask:
    """Progress of a task by the reports of its device, and the broadcast models it was sent.

    Broadcast models have numbers within the task, and ids that are unique across restarts.

    passes: all passes of the task.
    until: passes after which the device reports progress, by the last message.
    base: number of the broadcast model that the device trains from; 0: none.
    unconfirmed: number of the broadcast model in the last message; 0: none.
    pending: number of the newest broadcast model if it was not sent yet; 0: none.
    names: ids of the broadcast models by their numbers.
    """

    passes: int
    until: int = 1
    base: int = 0
    unconfirmed: int = 0
    pending: int = 0
    names: dict[int, str] = field(default_factory=dict)

    @property
    def has_next(self) -> bool:
        """Whether another message of this task will be sent."""
        return self.until < self.passes

    @property
    def usable(self) -> tuple[int, ...]:
        """Numbers of the broadcast models that the update can still be from."""
        return tuple(sorted({self.base, self.unconfirmed, self.pending} - {0}))

    def broadcast(self, number: int, name: str) -> None:
        self.pending, self.names[number] = number, name

    def confirm(self, progress: Progress) -> None:
        """Record a progress report; InvalidPayload if it does not match what was sent."""
        if not self.until <= progress.passes < self.passes:
            raise InvalidPayload(f"passes must be {self.until} to {self.passes - 1}")
        if progress.number and self.names.get(progress.number) != progress.name:
            raise InvalidPayload("the update is from a model that this server has not sent")
        self.base, self.unconfirmed = progress.number, 0
        self.until = progress.passes

    def next_order(self, task: Task, key: str) -> ResumeOrder:
        """The next message: one more pass, from the pending broadcast model if there is one."""
        self.until += 1
        if not self.pending:
            return ResumeOrder(key, self.until)
        number, self.unconfirmed, self.pending = self.pending, self.pending, 0
        newer = (*task.offers, *task.broadcasts)[number - 1]
        if newer is None:
            return ResumeOrder(key, self.until)
        offer = task.offer_of(newer.lineage)
        return ResumeOrder(key, self.until, number, self.names[number], offer, newer.params)

"""Messages without a reply, and the open tasks that they carry."""

from dataclasses import dataclass
from typing import Any

from latecomer.engines.resumable_tasks import ResumableTask


@dataclass(slots=True)
class InFlightMessage:
    """A message without a reply: a task, an evaluation of a `round`, or else a query.

    number: order among replies that are collected at the same moment.
    sent_at: seconds of the run's clock; a resumable task keeps the time of its first message.
    overdue: `Timeouts.overdue` has passed, and the server was notified.
    probed: the node was queried whether it still has the task.
    """

    number: int
    node: int
    sent_at: float
    device: int = -1
    task: int | None = None
    overdue: bool = False
    probed: bool = False
    round: int | None = None


class InFlightMessages:
    """All messages without a reply, by message id, and the state of every open task, by task id."""

    def __init__(self) -> None:
        self.open: dict[str, InFlightMessage] = {}
        self.busy: dict[int, str] = {}  # node -> id of the message that it works on
        self.keys: dict[int, str] = {}  # unique across restarts, unlike the task's id
        self.last_message: dict[int, str] = {}  # id of the last message that carried the task
        self.unsent: dict[int, InFlightMessage] = {}  # its device is absent, or busy with another
        self.lost_since: dict[int, float] = {}  # when its device or its reply was first lost
        self.resumable: dict[int, ResumableTask] = {}

    def add(self, message_id: str, message: InFlightMessage) -> None:
        self.open[message_id] = message
        if message.task is not None or message.round is not None:
            self.busy[message.node] = message_id
        if message.task is not None:
            self.last_message[message.task] = message_id
            self.unsent.pop(message.task, None)

    def remove(self, message_id: str) -> InFlightMessage | None:
        """Expect no reply to this message any more; its node is free. None if it is not open."""
        message = self.open.pop(message_id, None)
        if message is not None and self.busy.get(message.node) == message_id:
            del self.busy[message.node]
        return message

    def usable(self, task: int) -> tuple[int, ...]:
        """Numbers of the broadcasts that the update of this task can still be from."""
        return self.resumable[task].usable if task in self.resumable else ()

    def close_task(self, task: int) -> None:
        """Forget everything about a task that ended or failed."""
        by_task: tuple[dict[int, Any], ...] = (
            self.keys, self.last_message, self.unsent, self.lost_since, self.resumable
        )  # fmt: skip
        for each in by_task:
            each.pop(task, None)

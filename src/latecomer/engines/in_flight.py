"""Which messages are under way, and what they carry."""

from dataclasses import dataclass

from latecomer.engines.resumable_tasks import ResumableTask


@dataclass(slots=True)
class InFlightMessage:
    """A message that has not been answered; without a task it asks who the node is."""

    counter: int
    node: int
    sent: float
    device: int = -1
    task: int | None = None
    overdue: bool = False
    probed: bool = False


class InFlightMessages:
    """All messages without an answer, and the tasks they belong to."""

    def __init__(self) -> None:
        self.open: dict[str, InFlightMessage] = {}  # by message
        self.busy: dict[int, str] = {}  # node -> the message it works on
        self.newest: dict[int, str] = {}  # task -> the last message that carried it
        self.keys: dict[int, str] = {}  # task -> the name that it has for ever
        self.missing: dict[
            int, InFlightMessage
        ] = {}  # task -> as if sent, while its device is not there
        self.probes: dict[str, str] = {}  # a question to a node -> the message it has long had
        self.lost: dict[int, float] = {}  # task -> when its device, or an answer, was first lost
        self.resumable: dict[int, ResumableTask] = {}  # of tasks that are done in parts

    def took_off(self, message: str, flight: InFlightMessage) -> None:
        self.open[message] = flight
        if flight.task is not None:
            self.busy[flight.node] = message
            self.newest[flight.task] = message
            self.missing.pop(flight.task, None)

    def landed(self, message: str) -> InFlightMessage | None:
        """The flight of this message, which is over; its node is free."""
        flight = self.open.pop(message, None)
        if flight is not None and self.busy.get(flight.node) == message:
            del self.busy[flight.node]
        return flight

    def usable(self, task: int) -> tuple[int, ...]:
        """The broadcasts that the update of this task may still be from."""
        return self.resumable[task].usable if task in self.resumable else ()

    def closed(self, task: int) -> None:
        """Nobody waits for this task any more."""
        self.lost.pop(task, None)
        self.keys.pop(task, None)
        self.newest.pop(task, None)
        self.missing.pop(task, None)
        self.resumable.pop(task, None)

"""The state that all parts of the deployment loop share."""

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any
from uuid import uuid4

from latecomer.core.messages import Joined, Left
from latecomer.core.outcomes import Logged, Note
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.engines.device_registry import Device, DeviceRegistry
from latecomer.engines.in_flight import InFlightMessage, InFlightMessages
from latecomer.engines.resumable_tasks import ResumableTask
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.timer_queue import SAVED, Item, TimerQueue
from latecomer.engines.transport import Delivery, Timeouts, Transport


class DeployedRun:
    """A run over real nodes: server, transport, clock, devices, unanswered messages, timers.

    `submodels` maps every width that a device may have to its sub-model. `session` identifies this
    server process. It must differ from the session of every earlier process of the run, because
    task ids can repeat after a restart. `run_id` is the session of the run's first process.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport,
        timeouts: Timeouts,
        codec: TaskCodec,
        submodels: Mapping[float, Submodel | None],
        on_note: Callable[[float, Logged], None] | None,
        session: str,
    ) -> None:
        self.server, self.transport, self.timeouts = server, transport, timeouts
        self.codec, self.submodels, self._on_note = codec, submodels, on_note
        self.session = self.run_id = session or uuid4().hex[:12]
        self.registry = DeviceRegistry()
        self.in_flight = InFlightMessages()
        self.timers = TimerQueue()
        self.pending: list[tuple[int, Item]] = []  # due, and not yet handled
        self.bytes_up = self.bytes_down = 0
        self._earlier = 0.0  # seconds that earlier processes of the run lasted
        self._began = transport.now()

    @property
    def now(self) -> float:
        """Seconds that all processes of the run have lasted together."""
        return self._earlier + (self.transport.now() - self._began)

    def collect(self, until: float) -> list[Delivery]:
        """The next replies, by `until` on the run's clock."""
        return self.transport.collect(until - self._earlier + self._began)

    def note(self, kind: str, **fields: Any) -> None:
        """Write a line to the event log."""
        self.log(Note(kind, fields))

    def log(self, note: Logged) -> None:
        if self._on_note:
            self._on_note(self.now, note)

    def joined(self, device: Device) -> Joined:
        return Joined(device.number, self.submodels[device.width])

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint. Nodes are queried again after a restart."""
        timers = self.timers.saved()
        timers += [(self.now, n, item) for n, item in self.pending if isinstance(item, SAVED)]
        open_tasks, in_flight = self.server.open_tasks, self.in_flight
        return {
            "run": self.run_id,
            "now": self.now,
            "bytes": [self.bytes_up, self.bytes_down],
            "devices": self.registry.state(),
            "keys": {task: key for task, key in in_flight.keys.items() if task in open_tasks},
            "resumable": {task: astuple(each) for task, each in in_flight.resumable.items()},
            "timers": sorted(timers, key=lambda entry: entry[:2]),
            "number": self.timers.number,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run; the server must have been restored before."""
        self.run_id = state["run"]
        self._earlier, self._began = state["now"], self.transport.now()
        self.bytes_up, self.bytes_down = state["bytes"]
        self.registry.restore(state["devices"])
        in_flight = self.in_flight
        in_flight.keys = dict(state["keys"])
        in_flight.resumable = {t: ResumableTask(*each) for t, each in state["resumable"].items()}
        self.timers.restore(state["timers"], state["number"])
        for device in list(self.server.idle):
            self.timers.push(self.now, Left(device))
        for task in self.server.open_tasks.values():
            in_flight.keys.setdefault(task.id, f"{self.session}-{task.id}")
            # Its age counts from now on, so that a device that never returns frees its place.
            in_flight.unsent[task.id] = InFlightMessage(0, -1, self.now, task.device, task.id)

"""The loop around the pure server that drives real nodes, over any `Post`.

A node is a connection; a device is who stands behind it, by a name of its own. A node that appears
is asked who it is. A device has one open task at a time. A task that takes long is overdue: the
device no longer counts as working, and its reply is used whenever it comes. Devices that fail or
send what must be refused are left alone for a while, twice as long each time.

Broadcasts do not reach a device at work, because a node handles one message at a time.
"""

import heapq
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from typing import Any
from uuid import uuid4

from latecomer.core.messages import (
    Arrived,
    Broadcast,
    Command,
    Due,
    Event,
    Failed,
    Joined,
    Later,
    Left,
    Note,
    Ready,
    Received,
    Send,
    Stop,
    Task,
)
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.engines.post import Delivery, Post
from latecomer.engines.virtual import Bounds
from latecomer.engines.wire import (
    Parcel,
    Refused,
    decode_introduction,
    decode_update,
    encode_task,
)

WHOLE: Mapping[float, Submodel | None] = {1.0: None}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the loop waits for what, in seconds."""

    poll: float = 1.0  # at most, for replies
    look: float = 2.0  # between looks at which nodes there are
    hello: float = 300.0  # for a node to say who it is
    overdue: float = 3600.0  # for a reply, before others may take the device's place
    give_up: float = 7 * 86400.0  # for a reply, before its task is closed
    back_off: float = 5.0  # after a device's first failure, doubled with each further one
    longest_back_off: float = 3600.0

    def after(self, failures: int) -> float:
        return float(min(self.back_off * 2.0 ** min(failures - 1, 60), self.longest_back_off))


@dataclass(slots=True)
class _Flight:
    """A message that has not been answered; without a task it asks who the node is."""

    counter: int
    node: int
    sent: float
    device: int = -1
    task: int | None = None
    overdue: bool = False


@dataclass(slots=True)
class _Device:
    """Who has introduced itself under a name."""

    number: int
    proof: str  # sha256 of its key
    width: float
    node: int | None = None
    failures: int = 0
    waits_until: float = 0.0  # no message to it before


@dataclass(frozen=True, slots=True)
class _Overdue:
    device: int
    task: int


@dataclass(frozen=True, slots=True)
class _GiveUp:
    message: str


@dataclass(frozen=True, slots=True)
class _HelloAgain:
    node: int


@dataclass(frozen=True, slots=True)
class _Again:
    """A device may be written to again."""

    device: int


_Item = (
    Ready | Due | Failed | Left | Received | Delivery | _Overdue | _GiveUp | _HelloAgain | _Again
)
ROUNDING = 1e-9  # seconds; the sum of the lives of a run is not exact


class Federation:
    """Moves messages between one server and real nodes.

    `submodels` gives, by width, what devices may carry. `session` must differ from that of every
    earlier life of the same server: numbers of tasks may be given again after a restart.
    """

    def __init__(
        self,
        server: Server,
        post: Post,
        patience: Patience | None = None,
        submodels: Mapping[float, Submodel | None] = WHOLE,
        on_note: Callable[[float, Note], None] | None = None,
        session: str = "",
    ) -> None:
        self.server, self.post = server, post
        self.patience = patience or Patience()
        self.submodels = submodels
        self.on_note = on_note
        self.session = session or uuid4().hex[:12]
        self.name = self.session  # that of the run, which keeps the name of its first life
        self.bytes_up = self.bytes_down = 0
        self.stopped: str | None = None
        self._before = 0.0  # how long earlier lives have lasted
        self._began = post.now()
        self._looked_at = -inf
        self._repaired_at = 0.0
        self._names: dict[str, _Device] = {}
        self._devices: dict[int, _Device] = {}
        self._nodes: dict[int, int | None] = {}  # node -> device, None: not introduced
        self._node_failures: dict[int, int] = {}
        self._flights: dict[str, _Flight] = {}
        self._busy: dict[int, str] = {}  # node -> the message it works on
        self._newest: dict[int, str] = {}  # task -> the last message that carried it
        self._keys: dict[int, str] = {}  # task -> the name that it has for ever
        self._missing: dict[int, _Flight] = {}  # task -> as if sent, while its device is not there
        self._heap: list[tuple[float, int, _Item]] = []
        self._pending: list[tuple[int, _Item]] = []
        self._counter = 0

    @property
    def now(self) -> float:
        """Seconds that the run has lasted, over all its lives."""
        return self._before + (self.post.now() - self._began)

    def run(self, bounds: Bounds, after_step: Callable[[], bool] = lambda: True) -> str:
        """Run to the first bound; `after_step` ends it early by returning False. Says why."""
        while (reason := self._reason_to_end(bounds)) is None:
            self._step(bounds)
            if not after_step():
                return "interrupted"
        return reason

    def _reason_to_end(self, bounds: Bounds) -> str | None:
        if self.stopped is not None:
            return self.stopped
        if bounds.updates and self.server.accepted >= bounds.updates:
            return "updates"
        if bounds.epochs and self.server.store.commits >= bounds.epochs:
            return "epochs"
        if bounds.virtual_seconds and self.now >= bounds.virtual_seconds:
            return "virtual_seconds"
        return None

    def _step(self, bounds: Bounds) -> None:
        """Handle everything that has happened up to the next moment with news."""
        self._look()
        if not self._pending:
            self._pending = self._next_moment()
        room = bounds.updates - self.server.accepted if bounds.updates else -1
        events: list[Event] = []
        taken = 0
        for _, item in self._pending:
            if room == 0:
                break
            taken += 1
            for event in self._resolve(item):
                room -= isinstance(event, Arrived)
                events.append(event)
        del self._pending[:taken]
        if events:
            for command in self.server.handle(*events):
                self._carry_out(command)

    def _next_moment(self) -> list[tuple[int, _Item]]:
        """Replies and timers, in the order in which they were asked for."""
        soonest = self.now + self.patience.poll
        if self._heap:
            soonest = min(soonest, self._heap[0][0])
        until = soonest - self._before + self._began
        found: list[tuple[int, _Item]] = []
        for delivery in self.post.collect(until):
            flight = self._flights.get(delivery.message)
            found.append((flight.counter if flight else self._count(), delivery))
        now = self.now + ROUNDING
        while self._heap and self._heap[0][0] <= now:
            _, counter, item = heapq.heappop(self._heap)
            found.append((counter, item))
        return sorted(found, key=lambda each: each[0])

    def _look(self) -> None:
        """Nodes come and go."""
        now = self.now
        if now - self._looked_at < self.patience.look:
            return
        self._looked_at = now
        present = set(self.post.nodes())
        for node in [node for node in self._nodes if node not in present]:
            number = self._nodes.pop(node)
            self._busy.pop(node, None)
            if number is not None and self._devices[number].node == node:
                self._devices[number].node = None
                self._push(now, Left(number))
        for node in sorted(present - set(self._nodes)):
            self._nodes[node] = None
            self._hello(node)
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        """What has been under way for too long."""
        for message, flight in self._flights.items():
            age = now - flight.sent
            if age >= (self.patience.hello if flight.task is None else self.patience.give_up):
                self._push(now, _GiveUp(message))
            else:
                self._check_overdue(flight, age)
        for number, flight in list(self._missing.items()):
            if number not in self.server.open_tasks:
                del self._missing[number]
            elif now - flight.sent >= self.patience.give_up:
                self._closed(number)
                self._push(now, Failed(number, "its device has not come back"))
            else:
                self._check_overdue(flight, now - flight.sent)

    def _check_overdue(self, flight: _Flight, age: float) -> None:
        if flight.task is not None and not flight.overdue and age >= self.patience.overdue:
            flight.overdue = True
            self._push(self.now, _Overdue(flight.device, flight.task))

    def _hello(self, node: int) -> None:
        message = self.post.send(node, "hello", Parcel({"latecomer": 1}))
        if message is None:
            self._node_failed(node, "the message was not taken")
            return
        self._flights[message] = _Flight(self._count(), node, self.now)

    def _node_failed(self, node: int, reason: str) -> None:
        failures = self._node_failures[node] = self._node_failures.get(node, 0) + 1
        self._note(Note("refusal", {"node": node, "reason": f"no introduction: {reason}"}))
        self._push(self.now + self.patience.after(failures), _HelloAgain(node))

    def _resolve(self, item: _Item) -> Iterable[Event]:
        """What the server gets to see of it."""
        match item:
            case Delivery():
                yield from self._delivered(item)
            case _Overdue(device, task):
                yield from self._overdue(self._devices[device], task)
            case _GiveUp(message):
                yield from self._given_up(message)
            case _HelloAgain(node):
                if node in self._nodes and self._nodes[node] is None:
                    self._hello(node)
            case _Again(device):
                if self.now >= self._devices[device].waits_until:
                    yield from self._welcome(self._devices[device])
            case Ready() | Due() | Failed() | Left() | Received():
                yield item

    def _delivered(self, delivery: Delivery) -> Iterable[Event]:
        flight = self._flights.pop(delivery.message, None)
        if flight is None:
            reason = "it answers no message that is open"
            self._note(Note("refusal", {"device": None, "task": None, "reason": reason}))
        elif flight.task is None:
            yield from self._introduced(flight.node, delivery)
        else:
            if self._busy.get(flight.node) == delivery.message:
                del self._busy[flight.node]
            yield from self._answered(flight, flight.task, delivery)

    def _introduced(self, node: int, delivery: Delivery) -> Iterable[Event]:
        if node not in self._nodes:
            return  # it has gone meanwhile, and is asked anew when it is back
        try:
            if delivery.parcel is None:
                raise Refused(delivery.error)
            who = decode_introduction(delivery.parcel)
            if who.width not in self.submodels:
                raise Refused(f"there is no sub-model of width {who.width:g}")
            proof = sha256(who.key.encode()).hexdigest()
            known = self._names.get(who.name)
            if known is not None and not hmac.compare_digest(known.proof, proof):
                raise Refused(f"device {known.number} has this name, and another key")
        except Refused as error:
            self._node_failed(node, str(error))
            return
        if known is None:
            known = _Device(len(self._names), proof, who.width)
            self._names[who.name] = self._devices[known.number] = known
            fields = {"device": known.number, "name": who.name, "width": who.width}
            self._note(Note("introduction", fields))
        else:
            self._note(Note("return", {"device": known.number}))
        # A node that it had before may be listed for a while yet: it is not asked again.
        known.node, known.width = node, who.width
        self._nodes[node] = known.number
        self._node_failures.pop(node, None)
        if self.now >= known.waits_until:
            yield from self._welcome(known)

    def _welcome(self, device: _Device) -> Iterable[Event]:
        """It is there and free: it goes on with the task it has, or may be given one.

        A task is sent again as it was. A device that has done it keeps the answer and repeats it.
        """
        if device.node is None or device.node in self._busy:
            return
        tasks = [t for t in self.server.open_tasks.values() if t.device == device.number]
        working = self.server.working.get(device.number)
        if tasks:
            self._send(next((t for t in tasks if t.id == working), tasks[-1]))
        else:
            yield self._joined(device)

    def _joined(self, device: _Device) -> Joined:
        return Joined(device.number, self.submodels[device.width])

    def _answered(self, flight: _Flight, number: int, delivery: Delivery) -> Iterable[Event]:
        device, task = self._devices[flight.device], self.server.open_tasks.get(number)
        if delivery.parcel is None:
            if task is not None and self._newest.get(number) == delivery.message:
                yield from self._lost(device, task, delivery.error)
            return
        key = self._keys.get(number)
        if task is None or key is None:  # or closed at this very moment
            fields = {"device": device.number, "task": number}
            reason = "the task is unknown or already closed"
            self._note(Note("refusal", {**fields, "reason": reason}))
            if task is None and device.number not in self.server.working:
                yield from self._welcome(device)
            return
        try:
            update = decode_update(delivery.parcel, task, key)
        except Refused as error:
            yield from self._lost(device, task, f"refused: {error}")
            return
        counted = self.server.working.get(device.number) == number
        self._closed(number)
        yield Arrived(device.number, update, self.now - flight.sent)
        if not counted and device.number not in self.server.working:
            yield self._joined(device)
        if device.node is None:
            yield Left(device.number)

    def _lost(self, device: _Device, task: Task, reason: str) -> Iterable[Event]:
        self._closed(task.id)
        self._failed(device)
        self._push(device.waits_until, _Again(device.number))
        yield Failed(task.id, reason)

    def _failed(self, device: _Device) -> None:
        device.failures += 1
        device.waits_until = self.now + self.patience.after(device.failures)

    def _closed(self, task: int) -> None:
        self._keys.pop(task, None)
        self._newest.pop(task, None)
        self._missing.pop(task, None)

    def _overdue(self, device: _Device, task: int) -> Iterable[Event]:
        if self.server.working.get(device.number) == task:
            self._note(Note("overdue", {"device": device.number, "task": task}))
            # It works no longer in the server's eyes, and is not free either; its task stays open.
            yield self._joined(device)
            yield Left(device.number)

    def _given_up(self, message: str) -> Iterable[Event]:
        flight = self._flights.pop(message, None)
        if flight is None:
            return
        self.post.forget(message)
        if self._busy.get(flight.node) == message:
            del self._busy[flight.node]
        if flight.task is None:
            if self._nodes.get(flight.node, 0) is None:
                self._node_failed(flight.node, "it did not answer")
        elif self._newest.get(flight.task) == message:
            task = self.server.open_tasks.get(flight.task)
            if task is not None:
                waited = f"no answer within {self.patience.give_up:g} s"
                yield from self._lost(self._devices[flight.device], task, waited)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Note():
                self._heed(command)
                self._note(command)
            case Send(task):
                self._keys[task.id] = f"{self.session}-{task.id}"
                device = self._devices[task.device]
                if self.now < device.waits_until:
                    self._push(device.waits_until, _Again(device.number))
                else:
                    self._send(task)
            case Broadcast(tasks):
                fields = {"devices": [t.device for t in tasks], "reason": "they are at work"}
                self._push(self.now, Received(tuple((t.id, ()) for t in tasks)))
                self._note(Note("undelivered", fields))
            case Later(seconds, Ready() as ready):
                # Repairs queue up behind each other, as they do in the simulation.
                self._repaired_at = max(self.now, self._repaired_at) + seconds
                self._push(self._repaired_at, ready)
            case Later(seconds, due):
                self._push(self.now + seconds, due)
            case Stop(reason):
                self.stopped = reason

    def _heed(self, note: Note) -> None:
        """A device whose update was refused has to wait; one that was heard has made up for it."""
        device = self._devices.get(note.fields.get("device", -1))
        if note.kind == "refusal" and device is not None:
            self._failed(device)
        elif note.kind == "arrival" and device is not None:
            device.failures, device.waits_until = 0, 0.0
        if note.kind in ("arrival", "refusal"):
            self.bytes_up += note.fields.get("bytes", 0)

    def _send(self, task: Task) -> None:
        device = self._devices[task.device]
        node = device.node
        if node is None or node in self._busy:
            # It is sent when the node is back, or free.
            self._missing[task.id] = _Flight(0, -1, self.now, task.device, task.id)
            return
        task.began = self.now
        message = self.post.send(node, "train", encode_task(task, self._keys[task.id], self.name))
        if message is None:
            self._failed(device)
            self._closed(task.id)
            self._push(self.now, Failed(task.id, "the message was not taken"))
            self._push(device.waits_until, _Again(device.number))
            return
        self.bytes_down += task.bytes_down
        self._flights[message] = _Flight(self._count(), node, self.now, task.device, task.id)
        self._busy[node] = message
        self._newest[task.id] = message
        self._missing.pop(task.id, None)

    def _note(self, note: Note) -> None:
        if self.on_note:
            self.on_note(self.now, note)

    def _push(self, time: float, item: _Item) -> None:
        heapq.heappush(self._heap, (time, self._count(), item))

    def _count(self) -> int:
        self._counter += 1
        return self._counter

    def state(self) -> dict[str, Any]:
        """What a new life needs beside the server's own state. Nodes introduce themselves anew."""
        kept = Ready | Due | Failed | Received
        timers = [each for each in self._heap if isinstance(each[2], kept)]
        timers += [(self.now, c, item) for c, item in self._pending if isinstance(item, kept)]
        keys = {task: key for task, key in self._keys.items() if task in self.server.open_tasks}
        return {
            "name": self.name,
            "now": self.now,
            "stopped": self.stopped,
            "bytes": [self.bytes_up, self.bytes_down],
            "repaired_at": self._repaired_at,
            "devices": {n: [d.number, d.proof, d.width] for n, d in self._names.items()},
            "keys": keys,
            "timers": sorted(timers, key=lambda each: each[:2]),
            "counter": self._counter,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was saved; the server must have been restored before."""
        self.name = state["name"]
        self._before, self.stopped = state["now"], state["stopped"]
        self._began = self.post.now()
        self.bytes_up, self.bytes_down = state["bytes"]
        self._repaired_at = state["repaired_at"]
        self._names = {name: _Device(*fields) for name, fields in state["devices"].items()}
        self._devices = {device.number: device for device in self._names.values()}
        self._keys = dict(state["keys"])
        self._heap = list(state["timers"])
        heapq.heapify(self._heap)
        self._counter = state["counter"]
        for device in list(self.server.idle):
            self._push(self.now, Left(device))
        for task in self.server.open_tasks.values():
            self._keys.setdefault(task.id, f"{self.session}-{task.id}")
            # A device that never comes back must not hold its place for ever.
            self._missing[task.id] = _Flight(0, -1, self.now, task.device, task.id)

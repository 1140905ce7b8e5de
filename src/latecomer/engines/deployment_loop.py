"""The loop around the pure server that drives real nodes, over any `Transport`.

A node is a connection; a device is who stands behind it, by a name of its own. A node that appears
is asked who it is. A device has one open task at a time. A task that takes long is overdue: the
device no longer counts as working, and its reply is used whenever it comes. Devices that fail or
send what must be refused are left alone for a while, twice as long each time.

A node handles one message at a time, so tasks of strategies that broadcast are done in parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any
from uuid import uuid4

from latecomer.core.messages import (
    Arrived,
    Broadcast,
    Command,
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
    TimerExpired,
    wire_bytes,
)
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.engines.device_registry import Device, DeviceRegistry
from latecomer.engines.in_flight import InFlightMessage, InFlightMessages
from latecomer.engines.resumable_tasks import ResumableTask, restored
from latecomer.engines.task_codec import NativeCodec, TaskCodec
from latecomer.engines.timeouts import Timeouts
from latecomer.engines.timer_queue import (
    KEPT,
    ROUNDING,
    Again,
    Forgotten,
    GiveUp,
    HelloAgain,
    Item,
    Overdue,
    TimerQueue,
)
from latecomer.engines.transport import Delivery, Transport
from latecomer.engines.virtual import Bounds, BroadcastSent
from latecomer.engines.wire import (
    Introduction,
    InvalidPayload,
    Payload,
    decode_introduction,
    decode_progress,
    encode_go_on,
)

__all__ = ["WHOLE", "DeploymentLoop", "Timeouts"]

WHOLE: Mapping[float, Submodel | None] = {1.0: None}


class DeploymentLoop:
    """Moves messages between one server and real nodes.

    `submodels` gives, by width, what devices may carry. `session` must differ from that of every
    earlier life of the same server: numbers of tasks may be given again after a restart.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport,
        timeouts: Timeouts | None = None,
        submodels: Mapping[float, Submodel | None] = WHOLE,
        on_note: Callable[[float, Note], None] | None = None,
        session: str = "",
        codec: TaskCodec | None = None,
    ) -> None:
        self.server, self.transport = server, transport
        self.timeouts = timeouts or Timeouts()
        self.submodels = submodels
        self.on_note = on_note
        self.codec: TaskCodec = codec or NativeCodec()
        self.codec.check(server)
        self.session = session or uuid4().hex[:12]
        self.name = self.session  # that of the run, which keeps the name of its first life
        self.bytes_up = self.bytes_down = 0
        self.stopped: str | None = None
        self._before = 0.0  # how long earlier lives have lasted
        self._began = transport.now()
        self._looked_at = -inf
        self._repaired_at = 0.0
        self.registry = DeviceRegistry()
        self.in_flight = InFlightMessages()
        self.timers = TimerQueue()
        self._pending: list[tuple[int, Item]] = []
        self._going: list[tuple[Task, InFlightMessage]] = []  # devices that wait in mid-task

    @property
    def now(self) -> float:
        """Seconds that the run has lasted, over all its lives."""
        return self._before + (self.transport.now() - self._began)

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
        # Only now: what was broadcast at this moment goes with it.
        going, self._going = self._going, []
        for task, flight in going:
            self._go_on(task, flight)

    def _next_moment(self) -> list[tuple[int, Item]]:
        """Replies and timers, in the order in which they were asked for."""
        soonest = self.timers.before(self.now + self.timeouts.poll)
        found: list[tuple[int, Item]] = []
        for delivery in self.transport.collect(soonest - self._before + self._began):
            flight = self.in_flight.open.get(delivery.message)
            found.append((flight.counter if flight else self.timers.count(), delivery))
        found.extend(self.timers.due(self.now))
        return sorted(found, key=lambda each: each[0])

    def _look(self) -> None:
        """Nodes come and go."""
        now = self.now
        if now - self._looked_at < self.timeouts.look:
            return
        self._looked_at = now
        present = set(self.transport.nodes())
        for node, number in self.registry.gone(present):
            self.in_flight.busy.pop(node, None)
            if number is not None:
                self.timers.push(now, Left(number))
        for node in sorted(present - set(self.registry.nodes)):
            self.registry.nodes[node] = None
            self._hello(node)
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        """What has been under way for too long."""
        for message, flight in self.in_flight.open.items():
            age = now - flight.sent
            if age >= (self.timeouts.hello if flight.task is None else self.timeouts.give_up):
                self.timers.push(now, GiveUp(message))
            else:
                self._check_overdue(flight, age)
                self._probe(message, flight, age)
        for number, flight in list(self.in_flight.missing.items()):
            if number not in self.server.open_tasks:
                del self.in_flight.missing[number]
            elif now - flight.sent >= self._most(number):
                self.in_flight.closed(number)
                self.timers.push(now, Failed(number, "its device has not come back"))
            else:
                self._check_overdue(flight, now - flight.sent)

    def _probe(self, message: str, flight: InFlightMessage, age: float) -> None:
        """A node that died and is back at once was never seen to go, and knows nothing of its task.

        A real one handles one message at a time: when it answers a later one, it has none before.
        """
        if not self.transport.serial or flight.task is None or flight.probed:
            return
        if age < self.timeouts.probe:
            return
        if self.registry.nodes.get(flight.node) is None or self.codec.known(flight.node):
            return
        probe = self.transport.send(flight.node, "hello", Payload({"latecomer": 1}))
        if probe is not None:
            flight.probed = True
            self.in_flight.probes[probe] = message

    def _most(self, task: int) -> float:
        """How long a task stays open while its device is not there."""
        return self.timeouts.away if task in self.in_flight.lost else self.timeouts.give_up

    def _check_overdue(self, flight: InFlightMessage, age: float) -> None:
        if flight.task is not None and not flight.overdue and age >= self.timeouts.overdue:
            flight.overdue = True
            self.timers.push(self.now, Overdue(flight.device, flight.task))

    def _hello(self, node: int) -> None:
        who = self.codec.known(node)
        if who is not None:
            device, new = self.registry.introduced(node, who)
            self._greeted(device, who, new)
            self.timers.push(max(self.now, device.waits_until), Again(device.number))
            return
        message = self.transport.send(node, "hello", Payload({"latecomer": 1}))
        if message is None:
            self._node_failed(node, "the message was not taken")
            return
        self.in_flight.took_off(message, InFlightMessage(self.timers.count(), node, self.now))

    def _node_failed(self, node: int, reason: str) -> None:
        failures = self.registry.failures[node] = self.registry.failures.get(node, 0) + 1
        self._note(Note("refusal", {"node": node, "reason": f"no introduction: {reason}"}))
        self.timers.push(self.now + self.timeouts.after(failures), HelloAgain(node))

    def _resolve(self, item: Item) -> Iterable[Event]:
        """What the server gets to see of it."""
        match item:
            case Delivery():
                yield from self._delivered(item)
            case Overdue(device, task):
                yield from self._overdue(self.registry.devices[device], task)
            case GiveUp(message):
                yield from self._given_up(message)
            case Forgotten(message):
                yield from self._forgotten(message)
            case HelloAgain(node):
                if self.registry.unknown(node):
                    self._hello(node)
            case Again(device):
                if self.now + ROUNDING >= self.registry.devices[device].waits_until:
                    yield from self._welcome(self.registry.devices[device])
            case BroadcastSent(tasks):
                # As it is now: another broadcast may have left at the same moment.
                yield Received(tuple((task, self.in_flight.usable(task)) for task in tasks))
            case Ready() | TimerExpired() | Failed() | Left():
                yield item

    def _forgotten(self, message: str) -> Iterable[Event]:
        flight = self.in_flight.landed(message)
        if flight is None or flight.task is None:
            return
        self.transport.forget(message)
        task = self.server.open_tasks.get(flight.task)
        if task is not None and self.in_flight.newest.get(flight.task) == message:
            device = self.registry.devices[flight.device]
            yield from self._went_astray(device, task, "the node knows nothing of it any more")

    def _delivered(self, delivery: Delivery) -> Iterable[Event]:
        asked = self.in_flight.probes.pop(delivery.message, None)
        if asked is not None:
            if delivery.payload is not None and asked in self.in_flight.open:
                self.timers.push(self.now + self.timeouts.grace, Forgotten(asked))
            elif asked in self.in_flight.open:
                self.in_flight.open[asked].probed = False
            return
        flight = self.in_flight.landed(delivery.message)
        if flight is None:
            reason = "it answers no message that is open"
            self._note(Note("refusal", {"device": None, "task": None, "reason": reason}))
        elif flight.task is None:
            yield from self._introduced(flight.node, delivery)
        else:
            yield from self._answered(flight, flight.task, delivery)

    def _introduced(self, node: int, delivery: Delivery) -> Iterable[Event]:
        if node not in self.registry.nodes:
            return  # it has gone meanwhile, and is asked anew when it is back
        try:
            if delivery.payload is None:
                raise InvalidPayload(delivery.error)
            who = decode_introduction(delivery.payload)
            if who.width not in self.submodels:
                raise InvalidPayload(f"there is no sub-model of width {who.width:g}")
            device, new = self.registry.introduced(node, who)
        except InvalidPayload as error:
            self._node_failed(node, str(error))
            return
        self._greeted(device, who, new)
        if self.now >= device.waits_until:
            yield from self._welcome(device)

    def _greeted(self, device: Device, who: Introduction, new: bool) -> None:
        if new:
            fields = {"device": device.number, "name": who.name, "width": who.width}
            self._note(Note("introduction", fields))
        else:
            self._note(Note("return", {"device": device.number}))

    def _welcome(self, device: Device) -> Iterable[Event]:
        """It is there and free: it goes on with the task it has, or may be given one.

        A task is sent again as it was. A device that has done it keeps the answer and repeats it.
        """
        if device.node is None or device.node in self.in_flight.busy:
            return
        tasks = [t for t in self.server.open_tasks.values() if t.device == device.number]
        working = self.server.working.get(device.number)
        if tasks:
            self._send(next((t for t in tasks if t.id == working), tasks[-1]))
        else:
            yield self._joined(device)

    def _joined(self, device: Device) -> Joined:
        return Joined(device.number, self.submodels[device.width])

    def _answered(
        self, flight: InFlightMessage, number: int, delivery: Delivery
    ) -> Iterable[Event]:
        device, task = self.registry.devices[flight.device], self.server.open_tasks.get(number)
        if delivery.payload is None:
            if task is not None and self.in_flight.newest.get(number) == delivery.message:
                failed = self._went_astray if delivery.lost else self._lost
                yield from failed(device, task, delivery.error)
            return
        key = self.in_flight.keys.get(number)
        if task is None or key is None:  # or closed at this very moment
            fields = {"device": device.number, "task": number}
            reason = "the task is unknown or already closed"
            self._note(Note("refusal", {**fields, "reason": reason}))
            if task is None and device.number not in self.server.working:
                yield from self._welcome(device)
            return
        course = self.in_flight.resumable.get(number)
        try:
            if course is not None:
                progress = decode_progress(delivery.payload, key)
                if progress is not None:
                    course.heard(progress)
                    if task.broadcasts:
                        self.timers.push(self.now, BroadcastSent((number,)))
                    self._going.append((task, flight))
                    return
            newer = {} if course is None else course.names
            update = self.codec.decode(delivery.payload, task, key, newer)
        except InvalidPayload as error:
            yield from self._lost(device, task, f"refused: {error}")
            return
        counted = self.server.working.get(device.number) == number
        self.in_flight.closed(number)
        yield Arrived(device.number, update, self.now - flight.sent)
        if not counted and device.number not in self.server.working:
            yield self._joined(device)
        if device.node is None:
            yield Left(device.number)

    def _went_astray(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        """The task stays open for a while: the device may come back, and have the answer by then.

        Its place is free meanwhile.
        """
        since = self.in_flight.lost.setdefault(task.id, self.now)
        if self.now - since >= self.timeouts.away:
            yield from self._lost(device, task, reason)
            return
        self._note(Note("away", {"device": device.number, "task": task.id, "reason": reason}))
        self._failed(device)
        self.timers.push(device.waits_until, Again(device.number))
        self.in_flight.missing[task.id] = InFlightMessage(
            0, -1, since, device.number, task.id, True
        )
        if self.server.working.get(device.number) == task.id:
            yield self._joined(device)
            yield Left(device.number)

    def _lost(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        self.in_flight.closed(task.id)
        self._failed(device)
        self.timers.push(device.waits_until, Again(device.number))
        yield Failed(task.id, reason)

    def _failed(self, device: Device) -> None:
        device.failures += 1
        device.waits_until = self.now + self.timeouts.after(device.failures)

    def _overdue(self, device: Device, task: int) -> Iterable[Event]:
        if self.server.working.get(device.number) == task:
            self._note(Note("overdue", {"device": device.number, "task": task}))
            # It works no longer in the server's eyes, and is not free either; its task stays open.
            yield self._joined(device)
            yield Left(device.number)

    def _given_up(self, message: str) -> Iterable[Event]:
        flight = self.in_flight.landed(message)
        if flight is None:
            return
        self.transport.forget(message)
        if flight.task is None:
            if self.registry.unknown(flight.node):
                self._node_failed(flight.node, "it did not answer")
        elif self.in_flight.newest.get(flight.task) == message:
            task = self.server.open_tasks.get(flight.task)
            if task is not None:
                waited = f"no answer within {self.timeouts.give_up:g} s"
                yield from self._lost(self.registry.devices[flight.device], task, waited)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Note():
                self._heed(command)
                self._note(command)
            case Send(task):
                self.in_flight.keys[task.id] = f"{self.session}-{task.id}"
                device = self.registry.devices[task.device]
                if self.now < device.waits_until:
                    self.timers.push(device.waits_until, Again(device.number))
                else:
                    self._send(task)
            case Broadcast(tasks):
                self._broadcast(tasks)
            case Later(seconds, Ready() as ready):
                # Repairs queue up behind each other, as they do in the simulation.
                self._repaired_at = max(self.now, self._repaired_at) + seconds
                self.timers.push(self._repaired_at, ready)
            case Later(seconds, due):
                self.timers.push(self.now + seconds, due)
            case Stop(reason):
                self.stopped = reason

    def _broadcast(self, tasks: Sequence[Task]) -> None:
        """The newest model goes with the next message of those who are not at their last pass."""
        late = []
        for task in tasks:
            course = self.in_flight.resumable.get(task.id)
            if course is not None and course.hears:
                number = len(task.offers) + len(task.broadcasts)
                course.broadcast(number, f"{self.session}-{number}")
            else:
                late.append(task.device)
        self.timers.push(self.now, BroadcastSent(tuple(task.id for task in tasks)))
        if late:
            reason = "their last pass has begun"
            self._note(Note("undelivered", {"devices": late, "reason": reason}))

    def _go_on(self, task: Task, flight: InFlightMessage) -> None:
        """A device in mid-task is told to do the next pass."""
        course = self.in_flight.resumable.get(task.id)
        node = self.registry.devices[task.device].node
        if course is None or task.id not in self.server.open_tasks:
            return
        if node is None or node in self.in_flight.busy:
            # The task is sent again when the node is back, and goes on from there.
            self.in_flight.missing[task.id] = replace(flight, node=-1)
            return
        order = course.go_on(task, self.in_flight.keys[task.id])
        message = self.transport.send(node, "train", encode_go_on(order))
        if message is None:
            self._not_taken(task)
            return
        if order.newer is not None:
            self.bytes_down += wire_bytes(order.newer)
        # It keeps its place in the queue, and its age.
        self.in_flight.took_off(message, replace(flight, node=node))

    def _not_taken(self, task: Task) -> None:
        device = self.registry.devices[task.device]
        self._failed(device)
        self.in_flight.closed(task.id)
        self.timers.push(self.now, Failed(task.id, "the message was not taken"))
        self.timers.push(device.waits_until, Again(device.number))

    def _heed(self, note: Note) -> None:
        """A device whose update was refused has to wait; one that was heard has made up for it."""
        device = self.registry.devices.get(note.fields.get("device", -1))
        if note.kind == "refusal" and device is not None:
            self._failed(device)
        elif note.kind == "arrival" and device is not None:
            device.failures, device.waits_until = 0, 0.0
        if note.kind in ("arrival", "refusal"):
            self.bytes_up += note.fields.get("bytes", 0)

    def _send(self, task: Task) -> None:
        device = self.registry.devices[task.device]
        node = device.node
        if node is None or node in self.in_flight.busy:
            # It is sent when the node is back, or free.
            self.in_flight.missing[task.id] = InFlightMessage(0, -1, self.now, task.device, task.id)
            return
        task.began = self.now
        until = self._first_stop(task)
        key, use = self.in_flight.keys[task.id], self.server.use(task.lineage)
        payload = self.codec.encode(task, key, self.name, until, use)
        message = self.transport.send(node, "train", payload)
        if message is None:
            self._not_taken(task)
            return
        self.bytes_down += task.bytes_down
        flight = InFlightMessage(self.timers.count(), node, self.now, task.device, task.id)
        self.in_flight.took_off(message, flight)

    def _first_stop(self, task: Task) -> int:
        """After how many passes the device is to wait for a word; 0: it does all of them."""
        if task.spec.local_epochs < 2 or not self.server.strategy.broadcasts:
            return 0
        course = self.in_flight.resumable.setdefault(task.id, ResumableTask(task.spec.local_epochs))
        course.until = 1
        return course.until

    def _note(self, note: Note) -> None:
        if self.on_note:
            self.on_note(self.now, note)

    def state(self) -> dict[str, Any]:
        """What a new life needs beside the server's own state. Nodes introduce themselves anew."""
        timers = self.timers.kept()
        timers += [(self.now, c, item) for c, item in self._pending if isinstance(item, KEPT)]
        open_tasks = self.server.open_tasks
        return {
            "name": self.name,
            "now": self.now,
            "stopped": self.stopped,
            "bytes": [self.bytes_up, self.bytes_down],
            "repaired_at": self._repaired_at,
            "devices": self.registry.state(),
            "keys": {task: key for task, key in self.in_flight.keys.items() if task in open_tasks},
            "courses": {task: course.state() for task, course in self.in_flight.resumable.items()},
            "timers": sorted(timers, key=lambda each: each[:2]),
            "counter": self.timers.counter,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was saved; the server must have been restored before."""
        self.name = state["name"]
        self._before, self.stopped = state["now"], state["stopped"]
        self._began = self.transport.now()
        self.bytes_up, self.bytes_down = state["bytes"]
        self._repaired_at = state["repaired_at"]
        self.registry.restore(state["devices"])
        self.in_flight.keys = dict(state["keys"])
        courses = state.get("courses", {})
        self.in_flight.resumable = {task: restored(each) for task, each in courses.items()}
        self.timers = TimerQueue(state["timers"], state["counter"])
        for device in list(self.server.idle):
            self.timers.push(self.now, Left(device))
        for task in self.server.open_tasks.values():
            self.in_flight.keys.setdefault(task.id, f"{self.session}-{task.id}")
            # A device that never comes back must not hold its place for ever.
            self.in_flight.missing[task.id] = InFlightMessage(0, -1, self.now, task.device, task.id)

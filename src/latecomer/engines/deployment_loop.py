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
    Payload,
    Refused,
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
        post: Transport,
        patience: Timeouts | None = None,
        submodels: Mapping[float, Submodel | None] = WHOLE,
        on_note: Callable[[float, Note], None] | None = None,
        session: str = "",
        dialect: TaskCodec | None = None,
    ) -> None:
        self.server, self.post = server, post
        self.patience = patience or Timeouts()
        self.submodels = submodels
        self.on_note = on_note
        self.dialect: TaskCodec = dialect or NativeCodec()
        self.dialect.check(server)
        self.session = session or uuid4().hex[:12]
        self.name = self.session  # that of the run, which keeps the name of its first life
        self.bytes_up = self.bytes_down = 0
        self.stopped: str | None = None
        self._before = 0.0  # how long earlier lives have lasted
        self._began = post.now()
        self._looked_at = -inf
        self._repaired_at = 0.0
        self.roster = DeviceRegistry()
        self.flights = InFlightMessages()
        self.agenda = TimerQueue()
        self._pending: list[tuple[int, Item]] = []
        self._going: list[tuple[Task, InFlightMessage]] = []  # devices that wait in mid-task

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
        # Only now: what was broadcast at this moment goes with it.
        going, self._going = self._going, []
        for task, flight in going:
            self._go_on(task, flight)

    def _next_moment(self) -> list[tuple[int, Item]]:
        """Replies and timers, in the order in which they were asked for."""
        soonest = self.agenda.before(self.now + self.patience.poll)
        found: list[tuple[int, Item]] = []
        for delivery in self.post.collect(soonest - self._before + self._began):
            flight = self.flights.open.get(delivery.message)
            found.append((flight.counter if flight else self.agenda.count(), delivery))
        found.extend(self.agenda.due(self.now))
        return sorted(found, key=lambda each: each[0])

    def _look(self) -> None:
        """Nodes come and go."""
        now = self.now
        if now - self._looked_at < self.patience.look:
            return
        self._looked_at = now
        present = set(self.post.nodes())
        for node, number in self.roster.gone(present):
            self.flights.busy.pop(node, None)
            if number is not None:
                self.agenda.push(now, Left(number))
        for node in sorted(present - set(self.roster.nodes)):
            self.roster.nodes[node] = None
            self._hello(node)
        self._sweep(now)

    def _sweep(self, now: float) -> None:
        """What has been under way for too long."""
        for message, flight in self.flights.open.items():
            age = now - flight.sent
            if age >= (self.patience.hello if flight.task is None else self.patience.give_up):
                self.agenda.push(now, GiveUp(message))
            else:
                self._check_overdue(flight, age)
                self._probe(message, flight, age)
        for number, flight in list(self.flights.missing.items()):
            if number not in self.server.open_tasks:
                del self.flights.missing[number]
            elif now - flight.sent >= self._most(number):
                self.flights.closed(number)
                self.agenda.push(now, Failed(number, "its device has not come back"))
            else:
                self._check_overdue(flight, now - flight.sent)

    def _probe(self, message: str, flight: InFlightMessage, age: float) -> None:
        """A node that died and is back at once was never seen to go, and knows nothing of its task.

        A real one handles one message at a time: when it answers a later one, it has none before.
        """
        if not self.post.serial or flight.task is None or flight.probed:
            return
        if age < self.patience.probe:
            return
        if self.roster.nodes.get(flight.node) is None or self.dialect.known(flight.node):
            return
        probe = self.post.send(flight.node, "hello", Payload({"latecomer": 1}))
        if probe is not None:
            flight.probed = True
            self.flights.probes[probe] = message

    def _most(self, task: int) -> float:
        """How long a task stays open while its device is not there."""
        return self.patience.away if task in self.flights.lost else self.patience.give_up

    def _check_overdue(self, flight: InFlightMessage, age: float) -> None:
        if flight.task is not None and not flight.overdue and age >= self.patience.overdue:
            flight.overdue = True
            self.agenda.push(self.now, Overdue(flight.device, flight.task))

    def _hello(self, node: int) -> None:
        who = self.dialect.known(node)
        if who is not None:
            device, new = self.roster.introduced(node, who)
            self._greeted(device, who, new)
            self.agenda.push(max(self.now, device.waits_until), Again(device.number))
            return
        message = self.post.send(node, "hello", Payload({"latecomer": 1}))
        if message is None:
            self._node_failed(node, "the message was not taken")
            return
        self.flights.took_off(message, InFlightMessage(self.agenda.count(), node, self.now))

    def _node_failed(self, node: int, reason: str) -> None:
        failures = self.roster.failures[node] = self.roster.failures.get(node, 0) + 1
        self._note(Note("refusal", {"node": node, "reason": f"no introduction: {reason}"}))
        self.agenda.push(self.now + self.patience.after(failures), HelloAgain(node))

    def _resolve(self, item: Item) -> Iterable[Event]:
        """What the server gets to see of it."""
        match item:
            case Delivery():
                yield from self._delivered(item)
            case Overdue(device, task):
                yield from self._overdue(self.roster.devices[device], task)
            case GiveUp(message):
                yield from self._given_up(message)
            case Forgotten(message):
                yield from self._forgotten(message)
            case HelloAgain(node):
                if self.roster.unknown(node):
                    self._hello(node)
            case Again(device):
                if self.now + ROUNDING >= self.roster.devices[device].waits_until:
                    yield from self._welcome(self.roster.devices[device])
            case BroadcastSent(tasks):
                # As it is now: another broadcast may have left at the same moment.
                yield Received(tuple((task, self.flights.usable(task)) for task in tasks))
            case Ready() | TimerExpired() | Failed() | Left():
                yield item

    def _forgotten(self, message: str) -> Iterable[Event]:
        flight = self.flights.landed(message)
        if flight is None or flight.task is None:
            return
        self.post.forget(message)
        task = self.server.open_tasks.get(flight.task)
        if task is not None and self.flights.newest.get(flight.task) == message:
            device = self.roster.devices[flight.device]
            yield from self._went_astray(device, task, "the node knows nothing of it any more")

    def _delivered(self, delivery: Delivery) -> Iterable[Event]:
        asked = self.flights.probes.pop(delivery.message, None)
        if asked is not None:
            if delivery.parcel is not None and asked in self.flights.open:
                self.agenda.push(self.now + self.patience.grace, Forgotten(asked))
            elif asked in self.flights.open:
                self.flights.open[asked].probed = False
            return
        flight = self.flights.landed(delivery.message)
        if flight is None:
            reason = "it answers no message that is open"
            self._note(Note("refusal", {"device": None, "task": None, "reason": reason}))
        elif flight.task is None:
            yield from self._introduced(flight.node, delivery)
        else:
            yield from self._answered(flight, flight.task, delivery)

    def _introduced(self, node: int, delivery: Delivery) -> Iterable[Event]:
        if node not in self.roster.nodes:
            return  # it has gone meanwhile, and is asked anew when it is back
        try:
            if delivery.parcel is None:
                raise Refused(delivery.error)
            who = decode_introduction(delivery.parcel)
            if who.width not in self.submodels:
                raise Refused(f"there is no sub-model of width {who.width:g}")
            device, new = self.roster.introduced(node, who)
        except Refused as error:
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
        if device.node is None or device.node in self.flights.busy:
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
        device, task = self.roster.devices[flight.device], self.server.open_tasks.get(number)
        if delivery.parcel is None:
            if task is not None and self.flights.newest.get(number) == delivery.message:
                failed = self._went_astray if delivery.lost else self._lost
                yield from failed(device, task, delivery.error)
            return
        key = self.flights.keys.get(number)
        if task is None or key is None:  # or closed at this very moment
            fields = {"device": device.number, "task": number}
            reason = "the task is unknown or already closed"
            self._note(Note("refusal", {**fields, "reason": reason}))
            if task is None and device.number not in self.server.working:
                yield from self._welcome(device)
            return
        course = self.flights.courses.get(number)
        try:
            if course is not None:
                progress = decode_progress(delivery.parcel, key)
                if progress is not None:
                    course.heard(progress)
                    if task.broadcasts:
                        self.agenda.push(self.now, BroadcastSent((number,)))
                    self._going.append((task, flight))
                    return
            newer = {} if course is None else course.names
            update = self.dialect.decode(delivery.parcel, task, key, newer)
        except Refused as error:
            yield from self._lost(device, task, f"refused: {error}")
            return
        counted = self.server.working.get(device.number) == number
        self.flights.closed(number)
        yield Arrived(device.number, update, self.now - flight.sent)
        if not counted and device.number not in self.server.working:
            yield self._joined(device)
        if device.node is None:
            yield Left(device.number)

    def _went_astray(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        """The task stays open for a while: the device may come back, and have the answer by then.

        Its place is free meanwhile.
        """
        since = self.flights.lost.setdefault(task.id, self.now)
        if self.now - since >= self.patience.away:
            yield from self._lost(device, task, reason)
            return
        self._note(Note("away", {"device": device.number, "task": task.id, "reason": reason}))
        self._failed(device)
        self.agenda.push(device.waits_until, Again(device.number))
        self.flights.missing[task.id] = InFlightMessage(0, -1, since, device.number, task.id, True)
        if self.server.working.get(device.number) == task.id:
            yield self._joined(device)
            yield Left(device.number)

    def _lost(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        self.flights.closed(task.id)
        self._failed(device)
        self.agenda.push(device.waits_until, Again(device.number))
        yield Failed(task.id, reason)

    def _failed(self, device: Device) -> None:
        device.failures += 1
        device.waits_until = self.now + self.patience.after(device.failures)

    def _overdue(self, device: Device, task: int) -> Iterable[Event]:
        if self.server.working.get(device.number) == task:
            self._note(Note("overdue", {"device": device.number, "task": task}))
            # It works no longer in the server's eyes, and is not free either; its task stays open.
            yield self._joined(device)
            yield Left(device.number)

    def _given_up(self, message: str) -> Iterable[Event]:
        flight = self.flights.landed(message)
        if flight is None:
            return
        self.post.forget(message)
        if flight.task is None:
            if self.roster.unknown(flight.node):
                self._node_failed(flight.node, "it did not answer")
        elif self.flights.newest.get(flight.task) == message:
            task = self.server.open_tasks.get(flight.task)
            if task is not None:
                waited = f"no answer within {self.patience.give_up:g} s"
                yield from self._lost(self.roster.devices[flight.device], task, waited)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Note():
                self._heed(command)
                self._note(command)
            case Send(task):
                self.flights.keys[task.id] = f"{self.session}-{task.id}"
                device = self.roster.devices[task.device]
                if self.now < device.waits_until:
                    self.agenda.push(device.waits_until, Again(device.number))
                else:
                    self._send(task)
            case Broadcast(tasks):
                self._broadcast(tasks)
            case Later(seconds, Ready() as ready):
                # Repairs queue up behind each other, as they do in the simulation.
                self._repaired_at = max(self.now, self._repaired_at) + seconds
                self.agenda.push(self._repaired_at, ready)
            case Later(seconds, due):
                self.agenda.push(self.now + seconds, due)
            case Stop(reason):
                self.stopped = reason

    def _broadcast(self, tasks: Sequence[Task]) -> None:
        """The newest model goes with the next message of those who are not at their last pass."""
        late = []
        for task in tasks:
            course = self.flights.courses.get(task.id)
            if course is not None and course.hears:
                number = len(task.offers) + len(task.broadcasts)
                course.broadcast(number, f"{self.session}-{number}")
            else:
                late.append(task.device)
        self.agenda.push(self.now, BroadcastSent(tuple(task.id for task in tasks)))
        if late:
            reason = "their last pass has begun"
            self._note(Note("undelivered", {"devices": late, "reason": reason}))

    def _go_on(self, task: Task, flight: InFlightMessage) -> None:
        """A device in mid-task is told to do the next pass."""
        course = self.flights.courses.get(task.id)
        node = self.roster.devices[task.device].node
        if course is None or task.id not in self.server.open_tasks:
            return
        if node is None or node in self.flights.busy:
            # The task is sent again when the node is back, and goes on from there.
            self.flights.missing[task.id] = replace(flight, node=-1)
            return
        order = course.go_on(task, self.flights.keys[task.id])
        message = self.post.send(node, "train", encode_go_on(order))
        if message is None:
            self._not_taken(task)
            return
        if order.newer is not None:
            self.bytes_down += wire_bytes(order.newer)
        # It keeps its place in the queue, and its age.
        self.flights.took_off(message, replace(flight, node=node))

    def _not_taken(self, task: Task) -> None:
        device = self.roster.devices[task.device]
        self._failed(device)
        self.flights.closed(task.id)
        self.agenda.push(self.now, Failed(task.id, "the message was not taken"))
        self.agenda.push(device.waits_until, Again(device.number))

    def _heed(self, note: Note) -> None:
        """A device whose update was refused has to wait; one that was heard has made up for it."""
        device = self.roster.devices.get(note.fields.get("device", -1))
        if note.kind == "refusal" and device is not None:
            self._failed(device)
        elif note.kind == "arrival" and device is not None:
            device.failures, device.waits_until = 0, 0.0
        if note.kind in ("arrival", "refusal"):
            self.bytes_up += note.fields.get("bytes", 0)

    def _send(self, task: Task) -> None:
        device = self.roster.devices[task.device]
        node = device.node
        if node is None or node in self.flights.busy:
            # It is sent when the node is back, or free.
            self.flights.missing[task.id] = InFlightMessage(0, -1, self.now, task.device, task.id)
            return
        task.began = self.now
        until = self._first_stop(task)
        key, use = self.flights.keys[task.id], self.server.use(task.lineage)
        parcel = self.dialect.encode(task, key, self.name, until, use)
        message = self.post.send(node, "train", parcel)
        if message is None:
            self._not_taken(task)
            return
        self.bytes_down += task.bytes_down
        flight = InFlightMessage(self.agenda.count(), node, self.now, task.device, task.id)
        self.flights.took_off(message, flight)

    def _first_stop(self, task: Task) -> int:
        """After how many passes the device is to wait for a word; 0: it does all of them."""
        if task.spec.local_epochs < 2 or not self.server.strategy.broadcasts:
            return 0
        course = self.flights.courses.setdefault(task.id, ResumableTask(task.spec.local_epochs))
        course.until = 1
        return course.until

    def _note(self, note: Note) -> None:
        if self.on_note:
            self.on_note(self.now, note)

    def state(self) -> dict[str, Any]:
        """What a new life needs beside the server's own state. Nodes introduce themselves anew."""
        timers = self.agenda.kept()
        timers += [(self.now, c, item) for c, item in self._pending if isinstance(item, KEPT)]
        open_tasks = self.server.open_tasks
        return {
            "name": self.name,
            "now": self.now,
            "stopped": self.stopped,
            "bytes": [self.bytes_up, self.bytes_down],
            "repaired_at": self._repaired_at,
            "devices": self.roster.state(),
            "keys": {task: key for task, key in self.flights.keys.items() if task in open_tasks},
            "courses": {task: course.state() for task, course in self.flights.courses.items()},
            "timers": sorted(timers, key=lambda each: each[:2]),
            "counter": self.agenda.counter,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a run was saved; the server must have been restored before."""
        self.name = state["name"]
        self._before, self.stopped = state["now"], state["stopped"]
        self._began = self.post.now()
        self.bytes_up, self.bytes_down = state["bytes"]
        self._repaired_at = state["repaired_at"]
        self.roster.restore(state["devices"])
        self.flights.keys = dict(state["keys"])
        courses = state.get("courses", {})
        self.flights.courses = {task: restored(each) for task, each in courses.items()}
        self.agenda = TimerQueue(state["timers"], state["counter"])
        for device in list(self.server.idle):
            self.agenda.push(self.now, Left(device))
        for task in self.server.open_tasks.values():
            self.flights.keys.setdefault(task.id, f"{self.session}-{task.id}")
            # A device that never comes back must not hold its place for ever.
            self.flights.missing[task.id] = InFlightMessage(0, -1, self.now, task.device, task.id)

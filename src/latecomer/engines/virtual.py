"""The virtual engine: discrete events in virtual time around the pure server.

A heap of (time, counter, item); the counter makes ties deterministic. Training happens when its
result is needed and never for a task that is lost. All randomness comes from streams named by
(seed, device, task number), so the order of execution does not matter.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from latecomer.core.codec import portable
from latecomer.core.messages import (
    Arrived,
    Broadcast,
    Command,
    Event,
    Failed,
    Joined,
    Later,
    Left,
    Ready,
    Received,
    Send,
    Task,
    TimerExpired,
    Update,
    wire_bytes,
)
from latecomer.core.outcomes import (
    Accepted,
    BroadcastMade,
    Committed,
    Dispatched,
    Logged,
    Note,
    Outcome,
    Refused,
)
from latecomer.core.server import Server
from latecomer.core.strategy import Stateful
from latecomer.device.client import Rebases
from latecomer.engines.attack import Attack
from latecomer.engines.memory import keep_freed_memory, rare_collections
from latecomer.engines.trainers import OneByOne
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.task_times import TaskTimes


@portable
@dataclass(slots=True, eq=False)
class Upload:
    """The update of a task arrives at the server; it is computed then.

    `spans` are the seconds that its download, training and upload took.
    """

    task_id: int
    device: int
    sent: float
    spans: tuple[float, ...] = ()


@portable
@dataclass(frozen=True, slots=True)
class Opens:
    """A device's availability window opens."""

    device: int


@portable
@dataclass(frozen=True, slots=True)
class Closes:
    """A device's availability window closes."""

    device: int


@portable
@dataclass(frozen=True, slots=True)
class BroadcastSent:
    """A broadcast was sent to the devices that train these tasks."""

    tasks: tuple[int, ...]


Item = Upload | Opens | Closes | Joined | Failed | Ready | TimerExpired | BroadcastSent


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Virtual seconds of server work per merged update, evaluation and compensation.

    Compensations run on a second worker, so `compensate` does not delay the merges.
    """

    merge: float = 0.0
    evaluate: float = 0.0
    compensate: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a run ends; 0 is no bound. `epochs` counts commits of strategies that have epochs."""

    updates: int = 0
    epochs: int = 0
    virtual_seconds: float = 0.0

    def reached(self, server: Server) -> str | None:
        """The name of the bound on updates or epochs that is reached; None if neither is."""
        if self.updates and server.accepted >= self.updates:
            return "updates"
        if self.epochs and server.store.commits >= self.epochs:
            return "epochs"
        return None


class VirtualEngine(Stateful):
    """Runs one server against a simulated fleet in virtual time."""

    kept = (
        "now",
        "bytes_up",
        "bytes_down",
        "bytes_saved",
        "_free_at",
        "_compensated_at",
        "_active_at",
        "_trains",
        "_rebases",
        "_away",
        "_counter",
    )
    resumable = True  # whether a new engine can continue from `state`

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        trainer: OneByOne,
        devices: Collection[int],
        costs: ServerCosts | None = None,
        on_note: Callable[[float, Logged], None] | None = None,
    ) -> None:
        self.server, self.fleet, self.trainer = server, fleet, trainer
        self.costs = costs or ServerCosts()
        self.on_note = on_note
        self.attack = Attack()  # none; to be replaced before the run
        self.now = 0.0
        self.bytes_up = self.bytes_down = self.bytes_saved = 0
        self._free_at = 0.0  # when the server has finished its work; tasks are sent at that time
        self._compensated_at = 0.0  # when its last compensation ends
        self._active_at = 0.0  # when a message was last sent or received
        self._trains: dict[int, tuple[float, float]] = {}  # task -> begin, end of training
        self._rebases: dict[int, Rebases] = {}  # task -> when it takes newer models
        self._away: set[int] = set()  # devices that lost their task and have not rejoined
        self._spans: dict[int, tuple[float, ...]] = {}  # of the tasks that arrive at this moment
        self._heap: list[tuple[float, int, Item]] = []
        self._counter = 0
        self._broadcasts = server.parts.broadcasts
        self._windowed = {device for device in devices if fleet.has_windows(device)}
        for device in devices:
            opens = fleet.next_open(device, 0.0)
            self._push(opens, Opens(device) if device in self._windowed else Joined(device))

    def run(self, bounds: Bounds, after_step: Callable[[], bool]) -> str:
        """Run to the first bound, or until `after_step` returns False; returns the reason."""
        keep_freed_memory()
        with rare_collections():
            while (reason := self._reason_to_end(bounds)) is None:
                self._step(bounds.updates)
                if not after_step():
                    return "interrupted"
        return reason

    def charge_evaluation(self) -> None:
        """Keep the server busy for the time of an evaluation."""
        self._free_at = max(self._free_at, self.now) + self.costs.evaluate

    def _reason_to_end(self, bounds: Bounds) -> str | None:
        if self.server.stopped:
            return self.server.stopped
        if (done := bounds.reached(self.server)) is not None:
            return done
        if not self._heap:
            return "no events are left: all devices are lost or idle"
        next_at = max(self._heap[0][0], self._free_at)
        if bounds.virtual_seconds and next_at > bounds.virtual_seconds:
            return "virtual_seconds"
        if not self.server.open_tasks and self._stands(next_at - self._active_at):
            return "no task is open and no device has been given one for two availability periods"
        return None

    def _stands(self, idle_for: float) -> bool:
        """Whether only windows are due, and `idle_for` exceeds twice the longest period."""
        if idle_for <= 2 * self.fleet.longest_period:
            return False
        return all(isinstance(item, Opens | Closes) for _, _, item in self._heap)

    def _step(self, max_updates: int) -> None:
        """Handle everything that happens at the next moment."""
        time = self._heap[0][0]
        room = max_updates - self.server.accepted if max_updates else -1
        self.now = max(time, self._free_at)
        events: list[Event] = []
        while self._heap and self._heap[0][0] == time and room != 0:
            item = heapq.heappop(self._heap)[2]
            room -= isinstance(item, Upload)
            events.extend(self._resolve(item, time))
        self._free_at = self.now
        self._handle(events)

    def _handle(self, events: Iterable[Event]) -> None:
        """Let the server handle the events, charge its time, and carry out its commands."""
        commands = self.server.handle(*events)
        if self.costs.merge:
            merged = sum(c.updates for c in commands if isinstance(c, Committed))
            self._free_at += self.costs.merge * merged
        for command in commands:
            self._carry_out(command)

    def _resolve(self, item: Item, time: float) -> Iterable[Event]:
        """The server events of an item of the heap."""
        match item:
            case Upload(task_id, device, sent, spans):
                self._active_at = time
                self._trains.pop(task_id, None)
                self._spans[task_id] = spans
                yield Arrived(device, self._result(task_id), time - sent)
                yield from self._left_if_closed(device, time)
            case Opens(device):
                self._push(self.fleet.close_after(device, time), Closes(device))
                if device not in self.server.working and device not in self._away:
                    yield Joined(device)
            case Closes(device):
                self._push(self.fleet.next_open(device, time), Opens(device))
                yield Left(device)
            case Joined(device):
                self._away.discard(device)
                yield item
                yield from self._left_if_closed(device, time)
            case BroadcastSent(tasks):
                # With the latest plans: another broadcast may have been sent at the same moment.
                plans = ((number, self._rebases.get(number, ())) for number in tasks)
                yield Received(tuple((task, tuple(n for _, n in plan)) for task, plan in plans))
            case Failed() | Ready() | TimerExpired():
                self._active_at = time
                yield item

    def _left_if_closed(self, device: int, time: float) -> Iterable[Event]:
        if device in self._windowed and self.fleet.next_open(device, time) > time:
            yield Left(device)

    def _result(self, task_id: int) -> Update:
        task = self.server.open_tasks.get(task_id)
        if task is None:
            # The server has closed the task and will refuse the update: nothing to train.
            self.trainer.forget(task_id)
            self._rebases.pop(task_id, None)
            return Update(task_id, None, 1)
        rebases = self._rebases.pop(task_id, None)
        made = self.trainer.update(task, rebases) if rebases else self.trainer.update(task)
        return self.attack.changed(made, task)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Outcome() | Note():
                self._count(command)
                if self.on_note:
                    self.on_note(self.now, command)
            case Send(task):
                self._send(task)
            case Broadcast(tasks):
                for task in tasks:
                    self._broadcast(task)
                self._push(self.now, BroadcastSent(tuple(task.id for task in tasks)))
            case Later(seconds, Ready() as ready):
                # One worker beside the server's main line: compensations run one after another.
                begins = max(self.now, self._compensated_at)
                self._compensated_at = begins + seconds + self.costs.compensate
                self._push(self._compensated_at, ready)
            case Later(seconds, due):
                self._push(self.now + seconds, due)

    def _count(self, outcome: Logged) -> None:
        """Add up the bytes, and fill in how long the parts of a task took."""
        match outcome:
            case Dispatched() | BroadcastMade():
                self.bytes_down += outcome.bytes
            case Accepted() | Refused():
                self.bytes_up += outcome.bytes or 0
                if isinstance(outcome, Accepted):
                    self.bytes_saved += outcome.saved or 0
                if outcome.task is not None:
                    outcome.spans = self._spans.pop(outcome.task, None) or None

    def _send(self, task: Task) -> None:
        down, up = task.bytes_down, wire_bytes(task.params)
        task.began = self._free_at
        self.attack.sent(task, self.server.accepted)
        task_times = self.fleet.task_times(
            task.device, task.number, self._free_at, self.trainer.examples(task), down, up
        )
        self._active_at = self.now
        if task_times.arrives is not None:
            if self._broadcasts:
                self._trains[task.id] = (task_times.downloaded, task_times.trained)
            self._push(
                task_times.arrives, Upload(task.id, task.device, self._free_at, _spans(task_times))
            )
            self.trainer.expect(task, task_times.arrives)
        elif task_times.reported is not None:
            self._push(task_times.reported, Failed(task.id, "the device was lost in mid-task"))
        if task_times.arrives is None:
            self._away.add(task.device)
        if task_times.free is not None and task_times.free != task_times.arrives:
            self._push(task_times.free, Joined(task.device))

    def _broadcast(self, task: Task) -> None:
        """Plan after which local epoch a working device continues from the newer model."""
        span = self._trains.get(task.id)
        if span is None:
            return  # it will be lost
        begins, ends = span
        profile = self.fleet.devices[task.device]
        leaves = self.fleet.next_open(task.device, self._free_at)
        reached = leaves + profile.download_seconds(wire_bytes(task.params))
        passes = task.spec.local_epochs
        done = passes * (reached - begins) / (ends - begins) if ends > begins else passes
        after = max(0, ceil(done - 1e-9))  # just at the end of an epoch is in time
        if after >= passes or not self.trainer.renew(task):
            return  # its training is over, or cannot be continued from it
        number = len(task.offers) + len(task.broadcasts)
        earlier = self._rebases.get(task.id, ())
        self._rebases[task.id] = (*(r for r in earlier if r[0] < after), (after, number))

    def _push(self, time: float, item: Item) -> None:
        heapq.heappush(self._heap, (time, self._counter, item))
        self._counter += 1

    def state(self) -> dict[str, Any]:
        # The heap may be long: its items, which are never changed, are not copied.
        return {
            **super().state(),
            "heap": list(self._heap),
            "trainer": self.trainer.state(),
            "attack": self.attack.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._heap = list(state["heap"])
        self.trainer.restore(state["trainer"])
        self.attack.restore(state["attack"])
        for time, _, item in self._heap:
            # Tasks that continue from a newer model are not trained ahead.
            if (
                isinstance(item, Upload)
                and item.task_id in self.server.open_tasks
                and item.task_id not in self._rebases
            ):
                self.trainer.expect(self.server.open_tasks[item.task_id], time)


def _spans(task_times: TaskTimes) -> tuple[float, ...]:
    """Seconds of download, training and upload; the rest until it arrives is lateness."""
    sent, downloaded, trained, *_, uploaded = task_times
    done = trained if uploaded is None else uploaded
    return round(downloaded - sent, 6), round(trained - downloaded, 6), round(done - trained, 6)

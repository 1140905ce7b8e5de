"""The deployment loop: drives the pure server over real nodes, through any `Transport`.

A node is a connection. A device is identified by its own name and may reconnect through another
node. A device has one open task at a time. Its parts, one job each: `Introductions` (which device
is behind a node), `TaskDispatch` (sending), `Replies` (decoding), `ClientEvaluations` (metrics on
devices), `ReplyTimeouts` and `TaskFailures` (what happens without a valid reply). They share a
`DeployedRun`.
"""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

from latecomer.core.messages import (
    Arrived,
    Broadcast,
    Command,
    Event,
    Failed,
    Later,
    Left,
    Ready,
    Received,
    Send,
    TimerExpired,
    Update,
)
from latecomer.core.outcomes import Accepted, Logged, Note, Outcome, Refused
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.engines.client_evaluations import ClientEvaluations
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.introductions import Introductions
from latecomer.engines.replies import Replies
from latecomer.engines.reply_timeouts import ReplyTimeouts
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.task_dispatch import TaskDispatch
from latecomer.engines.task_failures import TaskFailures
from latecomer.engines.timer_queue import ROUNDING, BackOffOver, Item
from latecomer.engines.transport import Delivery, Timeouts, Transport
from latecomer.engines.virtual import Bounds, BroadcastSent

__all__ = ["WHOLE", "DeploymentLoop", "Timeouts"]

WHOLE: Mapping[float, Submodel | None] = {1.0: None}


class DeploymentLoop:
    """Hands replies and timers to the server, moment by moment, and carries out its commands.

    `codec` encodes tasks for the devices; None: they run Latecomer. See `DeployedRun` for
    `submodels` and `session`. `on_note(seconds, note)` receives the lines of the event log,
    `on_update` the accepted updates.
    """

    def __init__(
        self,
        server: Server,
        transport: Transport,
        timeouts: Timeouts | None = None,
        submodels: Mapping[float, Submodel | None] = WHOLE,
        on_note: Callable[[float, Logged], None] | None = None,
        session: str = "",
        codec: TaskCodec | None = None,
    ) -> None:
        codec = codec or TaskCodec()
        codec.check(server)
        self.server, self.timeouts = server, timeouts or Timeouts()
        self.shared = run = DeployedRun(
            server, transport, self.timeouts, codec, submodels, on_note, session
        )
        self.registry, self.in_flight, self.timers = run.registry, run.in_flight, run.timers
        self.failures = TaskFailures(run)
        self.dispatch = TaskDispatch(run, self.failures)
        self.introductions = Introductions(run, self.dispatch)
        self.replies = Replies(run, self.dispatch, self.failures)
        self.evaluations = ClientEvaluations(run, self.dispatch)
        self.reply_timeouts = ReplyTimeouts(
            run, self.failures, self.introductions, self.evaluations
        )
        self.on_update: Callable[[Update], None] = lambda update: None
        self._checked_at = -inf
        # Whether tasks of the moment in which the run ends stay unsent, like those of a restart.
        self.ends_idle = False

    @property
    def now(self) -> float:
        """Seconds that all processes of the run have lasted together."""
        return self.shared.now

    def run(self, bounds: Bounds, after_step: Callable[[], bool] = lambda: True) -> str:
        """Run to the first bound and return its name; `after_step` ends it by returning False."""
        while (reason := self._reason_to_end(bounds)) is None:
            self._step(bounds)
            if not after_step():
                return "interrupted"
        return reason

    def _reason_to_end(self, bounds: Bounds) -> str | None:
        if self.server.stopped:
            return self.server.stopped
        if bounds.virtual_seconds and self.now >= bounds.virtual_seconds:
            return "virtual_seconds"
        return bounds.reached(self.server)

    def _step(self, bounds: Bounds) -> None:
        """Handle all replies and timers of the next moment at which there are any."""
        self._check_nodes()
        pending = self.shared.pending
        if not pending:
            pending.extend(self._next_moment())
        room = bounds.updates - self.server.accepted if bounds.updates else -1
        events: list[Event] = []
        taken = 0
        for _, item in pending:
            if room == 0:
                break
            taken += 1
            for event in self._resolve(item):
                room -= isinstance(event, Arrived)
                events.append(event)
        del pending[:taken]
        self.evaluations.send_waiting()  # before new tasks: a node handles one message at a time
        if events:
            self._handle(events, bounds)
        self.dispatch.continue_paused()

    def _handle(self, events: list[Event], bounds: Bounds) -> None:
        """Pass events to the server and carry out its commands."""
        updates = {each.update.task_id: each.update for each in events if isinstance(each, Arrived)}
        commands = self.server.handle(*events)
        ends = self.ends_idle and self._reason_to_end(bounds) is not None
        for command in commands:
            if isinstance(command, Accepted) and command.task in updates:
                self.on_update(updates[command.task])
            if not (ends and isinstance(command, Send)):
                self._carry_out(command)

    def finish_evaluations(self, seconds: float) -> None:
        """Wait for the open evaluations, at most so long; updates that arrive are not used."""
        end = self.now + seconds
        while self.now < end and self.evaluations.are_open():
            self._check_nodes()
            self.evaluations.send_waiting()
            for delivery in self.shared.collect(min(end, self.now + self.timeouts.poll)):
                message = self.in_flight.remove(delivery.message)
                if message is not None and message.round is not None:
                    self.evaluations.record(message, delivery)

    def _check_nodes(self) -> None:
        now = self.now
        if now - self._checked_at >= self.timeouts.node_poll:
            self._checked_at = now
            self.introductions.update_nodes(now)
            self.reply_timeouts.check(now)

    def _next_moment(self) -> list[tuple[int, Item]]:
        """Replies and due timers, in the order in which their messages and timers were created."""
        found: list[tuple[int, Item]] = []
        for delivery in self.shared.collect(self.timers.next_due(self.now + self.timeouts.poll)):
            message = self.in_flight.open.get(delivery.message)
            found.append((message.number if message else self.timers.next_number(), delivery))
        found.extend(self.timers.pop_due(self.now))
        return sorted(found, key=lambda entry: entry[0])

    def _resolve(self, item: Item) -> Iterable[Event]:
        """The events for the server that a reply or a timer leads to."""
        match item:
            case Delivery():
                yield from self._delivered(item)
            case BackOffOver(number):
                device = self.registry.devices[number]
                if self.now + ROUNDING >= device.back_off_until:
                    yield from self.dispatch.resume(device)
            case BroadcastSent(tasks):
                # Computed only now: another broadcast may have been sent at the same moment.
                yield Received(tuple((task, self.in_flight.usable(task)) for task in tasks))
            case Ready() | TimerExpired() | Failed() | Left():
                yield item
            case _:
                yield from item() or ()

    def _delivered(self, delivery: Delivery) -> Iterable[Event]:
        """Pass a reply to the part that handles the message it answers."""
        if self.reply_timeouts.is_probe(delivery):
            return
        message = self.in_flight.remove(delivery.message)
        if message is None:
            reason = "the reply answers no open message"
            self.shared.note("refusal", device=None, task=None, reason=reason)
        elif message.round is not None:
            yield from self.evaluations.answered(message, delivery)
        elif message.task is None:
            yield from self.introductions.answered(message.node, delivery)
        else:
            yield from self.replies.answered(message, message.task, delivery)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Accepted() | Refused():
                self._received(command)
                self.shared.log(command)
            case Outcome() | Note():
                self.shared.log(command)
            case Send(task):
                self.dispatch.assign(task)
            case Broadcast(tasks):
                self.dispatch.broadcast(tasks)
            case Later(_, Ready() as ready):
                # The seconds are virtual; here the compensation itself takes time.
                self.timers.push(self.now, ready)
            case Later(seconds, expired):
                self.timers.push(self.now + seconds, expired)

    def _received(self, outcome: Accepted | Refused) -> None:
        """Count an update's bytes; begin or end the back-off of its device."""
        self.shared.bytes_up += outcome.bytes or 0
        device = None if outcome.device is None else self.registry.devices.get(outcome.device)
        if device is not None and isinstance(outcome, Refused):
            self.failures.back_off(device)
        elif device is not None:
            self.failures.end_back_off(device)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint, beside the server's own state."""
        return self.shared.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run; the server must have been restored before."""
        self.shared.restore(state)

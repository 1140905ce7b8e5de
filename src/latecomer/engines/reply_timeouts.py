"""Timeouts of messages that have no reply."""

from collections.abc import Iterable
from functools import partial

from latecomer.core.messages import Event, Failed
from latecomer.engines.client_evaluations import ClientEvaluations
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.introductions import QUERY, Introductions
from latecomer.engines.task_failures import TaskFailures
from latecomer.engines.transport import Delivery


class ReplyTimeouts:
    """Marks tasks overdue, probes their nodes, and gives up replies, after `Timeouts` seconds."""

    def __init__(
        self,
        run: DeployedRun,
        failures: TaskFailures,
        introductions: Introductions,
        evaluations: ClientEvaluations,
    ) -> None:
        self.run, self.failures, self.introductions = run, failures, introductions
        self.evaluations = evaluations
        self._probes: dict[str, str] = {}  # id of a probe -> id of the message that it asks about

    def check(self, now: float) -> None:
        """Set timers for all messages and unsent tasks that have reached a timeout."""
        run, in_flight, timeouts = self.run, self.run.in_flight, self.run.timeouts
        for message_id, message in in_flight.open.items():
            age = now - message.sent_at
            if age >= self._limit(message):
                run.timers.push(now, partial(self.give_up, message_id))
            else:
                self._check_overdue(message, age)
                self._probe(message_id, message, age)
        for task, message in list(in_flight.unsent.items()):
            age = now - message.sent_at
            if task not in run.server.open_tasks:
                del in_flight.unsent[task]
            elif age >= (timeouts.away if task in in_flight.lost_since else timeouts.give_up):
                in_flight.close_task(task)
                run.timers.push(now, Failed(task, "its device has not come back"))
            else:
                self._check_overdue(message, age)

    def _limit(self, message: InFlightMessage) -> float:
        timeouts = self.run.timeouts
        if message.round is not None:
            return timeouts.overdue
        return timeouts.introduction if message.task is None else timeouts.give_up

    def _check_overdue(self, message: InFlightMessage, age: float) -> None:
        if message.task is not None and not message.overdue and age >= self.run.timeouts.overdue:
            message.overdue = True
            self.run.timers.push(self.run.now, partial(self.overdue, message.device, message.task))

    def _probe(self, message_id: str, message: InFlightMessage, age: float) -> None:
        """Query a node that has had a task for `Timeouts.probe` seconds.

        A node can die and reconnect between two looks at the list of nodes, without its task.
        Nodes handle one message at a time: a node that answers the query has no earlier message.
        """
        run = self.run
        if not run.transport.serial or message.task is None or message.probed:
            return
        if age < run.timeouts.probe:
            return
        if run.registry.nodes.get(message.node) is None or run.codec.known(message.node):
            return
        probe = run.transport.send(message.node, "query", QUERY)
        if probe is not None:
            message.probed = True
            self._probes[probe] = message_id

    def is_probe(self, delivery: Delivery) -> bool:
        """Whether the delivery answers a probe; the task is then lost after `Timeouts.grace`."""
        message_id = self._probes.pop(delivery.message, None)
        if message_id is None:
            return False
        message = self.run.in_flight.open.get(message_id)
        if message is not None and delivery.payload is not None:
            later = self.run.now + self.run.timeouts.grace
            self.run.timers.push(later, partial(self.lost_by_node, message_id))
        elif message is not None:
            message.probed = False
        return True

    def overdue(self, device_number: int, task: int) -> Iterable[Event]:
        """Release the device, so that another can take its place; its reply is still accepted."""
        if self.run.server.working.get(device_number) == task:
            self.run.note("overdue", device=device_number, task=task)
            yield from self.failures.release(self.run.registry.devices[device_number])

    def lost_by_node(self, message_id: str) -> Iterable[Event]:
        """Handle a task that its node has lost, unless the reply came within the grace period."""
        run = self.run
        message = run.in_flight.remove(message_id)
        if message is None or message.task is None:
            return
        run.transport.forget(message_id)
        task = run.server.open_tasks.get(message.task)
        if task is not None and run.in_flight.last_message.get(task.id) == message_id:
            device = run.registry.devices[message.device]
            yield from self.failures.device_lost(device, task, "the node has lost the task")

    def give_up(self, message_id: str) -> Iterable[Event]:
        """Expect no reply to this message any more."""
        run = self.run
        message = run.in_flight.remove(message_id)
        if message is None:
            return
        run.transport.forget(message_id)
        if message.round is not None:
            reason = f"no reply within {run.timeouts.overdue:g} s"
            yield from self.evaluations.answered(message, Delivery(message_id, error=reason))
        elif message.task is None:
            if run.registry.lacks_introduction(message.node):
                self.introductions.failed(message.node, "no reply")
        elif run.in_flight.last_message.get(message.task) == message_id:
            task = run.server.open_tasks.get(message.task)
            if task is not None:
                reason = f"no reply within {run.timeouts.give_up:g} s"
                yield from self.failures.failed(run.registry.devices[message.device], task, reason)

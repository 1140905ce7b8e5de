"""Replies of devices to tasks, as events for the server."""

from collections.abc import Iterable

from latecomer.core.messages import Arrived, Event, Left, Task, Update
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.task_dispatch import TaskDispatch
from latecomer.engines.task_failures import TaskFailures
from latecomer.engines.transport import Delivery
from latecomer.engines.virtual import BroadcastSent
from latecomer.engines.wire import InvalidPayload, decode_progress


class Replies:
    """Decodes replies to tasks; errors and invalid payloads fail the task, never the loop."""

    def __init__(self, run: DeployedRun, dispatch: TaskDispatch, failures: TaskFailures) -> None:
        self.run, self.dispatch, self.failures = run, dispatch, failures

    def answered(
        self, message: InFlightMessage, task_id: int, delivery: Delivery
    ) -> Iterable[Event]:
        run, in_flight = self.run, self.run.in_flight
        device, task = run.registry.devices[message.device], run.server.open_tasks.get(task_id)
        if delivery.payload is None:
            if task is not None and in_flight.last_message.get(task_id) == delivery.message:
                failed = self.failures.device_lost if delivery.lost else self.failures.failed
                yield from failed(device, task, delivery.error)
            return
        key = in_flight.keys.get(task_id)
        if task is None or key is None:  # or closed at this moment
            reason = "the task is unknown or already closed"
            run.note("refusal", device=device.number, task=task_id, reason=reason)
            if task is None and device.number not in run.server.working:
                yield from self.dispatch.resume(device)
            return
        try:
            update = self._decode(task, key, message, delivery)
        except InvalidPayload as error:
            yield from self.failures.failed(device, task, f"refused: {error}")
            return
        if update is None:
            return
        was_working = run.server.working.get(device.number) == task_id
        in_flight.close_task(task_id)
        yield Arrived(device.number, update, run.now - message.sent_at)
        if not was_working and device.number not in run.server.working:
            yield run.joined(device)
        if device.node is None:
            yield Left(device.number)

    def _decode(
        self, task: Task, key: str, message: InFlightMessage, delivery: Delivery
    ) -> Update | None:
        """The update in a reply; None after a progress report, which pauses the task."""
        assert delivery.payload is not None
        resumable = self.run.in_flight.resumable.get(task.id)
        progress = None if resumable is None else decode_progress(delivery.payload, key)
        if resumable is None or progress is None:
            sent = {} if resumable is None else resumable.names
            return self.run.codec.decode(delivery.payload, task, key, sent)
        resumable.confirm(progress)
        if task.broadcasts:
            self.run.timers.push(self.run.now, BroadcastSent((task.id,)))
        self.dispatch.pause(task, message)
        return None

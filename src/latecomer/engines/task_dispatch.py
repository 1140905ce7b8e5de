"""Sending of tasks to devices: first, again after a reconnection, and epoch by epoch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from latecomer.core.messages import Event, Task, wire_bytes
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.device_registry import Device
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.resumable_tasks import ResumableTask
from latecomer.engines.task_failures import TaskFailures
from latecomer.engines.virtual import BroadcastSent
from latecomer.engines.wire import encode_resume


class TaskDispatch:
    """Sends tasks to devices that are connected, free and not in back-off.

    A node handles one message at a time. If the strategy broadcasts, a task therefore takes one
    message per local epoch, and a broadcast model travels with the next of them.
    """

    def __init__(self, run: DeployedRun, failures: TaskFailures) -> None:
        self.run, self.failures = run, failures
        self._paused: list[tuple[Task, InFlightMessage]] = []  # their device waits in mid-task

    def assign(self, task: Task) -> None:
        """Send a new task, after the device's back-off if it is in one."""
        self.run.in_flight.keys[task.id] = f"{self.run.session}-{task.id}"
        device = self.run.registry.devices[task.device]
        if self.run.now < device.back_off_until:
            self.failures.retry_later(device)
        else:
            self.send(task)

    def resume(self, device: Device) -> Iterable[Event]:
        """Send a free device its open task again; without one, it joins the idle devices.

        A device that has already answered the task repeats its reply and does not train again.
        """
        server = self.run.server
        if device.node is None or device.node in self.run.in_flight.busy:
            return
        tasks = [task for task in server.open_tasks.values() if task.device == device.number]
        working = server.working.get(device.number)
        if tasks:
            self.send(next((task for task in tasks if task.id == working), tasks[-1]))
        else:
            yield self.run.joined(device)

    def send(self, task: Task) -> None:
        """Send the task now; if its device is absent or busy, when it is present and free."""
        run = self.run
        device = run.registry.devices[task.device]
        node = device.node
        if node is None or node in run.in_flight.busy:
            unsent = InFlightMessage(0, -1, run.now, task.device, task.id)
            run.in_flight.unsent[task.id] = unsent
            return
        task.began = run.now
        key, serving = run.in_flight.keys[task.id], run.server.serving_settings(task.lineage)
        payload = run.codec.encode(task, key, run.run_id, self._first_stop(task), serving)
        message_id = run.transport.send(node, "train", payload)
        if message_id is None:
            self.failures.not_sent(device, task)
            return
        run.bytes_down += task.bytes_down
        message = InFlightMessage(run.timers.next_number(), node, run.now, task.device, task.id)
        run.in_flight.add(message_id, message)

    def _first_stop(self, task: Task) -> int:
        """Epochs after which the device reports progress and waits; 0: it trains all epochs."""
        if task.spec.local_epochs < 2 or not self.run.server.parts.broadcasts:
            return 0
        resumable = self.run.in_flight.resumable.setdefault(
            task.id, ResumableTask(task.spec.local_epochs)
        )
        resumable.until = 1
        return resumable.until

    def pause(self, task: Task, message: InFlightMessage) -> None:
        """The device has reported progress: it waits for `continue_paused`."""
        self._paused.append((task, message))

    def continue_paused(self) -> None:
        """Send the order for the next epoch to every device that waits in mid-task.

        Called after the commands of a moment, so that models broadcast at that moment are sent.
        """
        paused, self._paused = self._paused, []
        for task, message in paused:
            self._continue(task, message)

    def _continue(self, task: Task, message: InFlightMessage) -> None:
        run = self.run
        resumable = run.in_flight.resumable.get(task.id)
        device = run.registry.devices[task.device]
        if resumable is None or task.id not in run.server.open_tasks:
            return
        if device.node is None or device.node in run.in_flight.busy:
            # The task is sent again when the node is back, and continues from its progress.
            run.in_flight.unsent[task.id] = replace(message, node=-1)
            return
        order = resumable.next_order(task, run.in_flight.keys[task.id])
        message_id = run.transport.send(device.node, "train", encode_resume(order))
        if message_id is None:
            self.failures.not_sent(device, task)
            return
        if order.newer is not None:
            run.bytes_down += wire_bytes(order.newer)
        # It keeps its number and the time of the first message.
        run.in_flight.add(message_id, replace(message, node=device.node))

    def broadcast(self, tasks: Sequence[Task]) -> None:
        """Send the newest model with the next message of every task that has one to come."""
        run, missed = self.run, []
        for task in tasks:
            resumable = run.in_flight.resumable.get(task.id)
            if resumable is not None and resumable.has_next:
                number = len(task.offers) + len(task.broadcasts)
                resumable.broadcast(number, f"{run.session}-{number}")
            else:
                missed.append(task.device)
        run.timers.push(run.now, BroadcastSent(tuple(task.id for task in tasks)))
        if missed:
            run.note("undelivered", devices=missed, reason="their last epoch has begun")

"""Failures of tasks and the back-off of their devices."""

from collections.abc import Iterable

from latecomer.core.messages import Event, Failed, Left, Task
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.device_registry import Device
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.timer_queue import BackOffOver


class TaskFailures:
    """Closes failed tasks, keeps tasks of lost devices open for a while, and backs devices off.

    A device in back-off gets no message: for `Timeouts.back_off` seconds after its first failure,
    twice as long after every further one, until an update of it is accepted.
    """

    def __init__(self, run: DeployedRun) -> None:
        self.run = run

    def back_off(self, device: Device) -> None:
        device.failures += 1
        device.back_off_until = self.run.now + self.run.timeouts.after(device.failures)

    def end_back_off(self, device: Device) -> None:
        device.failures, device.back_off_until = 0, 0.0

    def retry_later(self, device: Device) -> None:
        """Set a timer for the end of the device's back-off."""
        self.run.timers.push(device.back_off_until, BackOffOver(device.number))

    def failed(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        """Close a task whose reply was an error or invalid, or did not come."""
        self.run.in_flight.close_task(task.id)
        self.back_off(device)
        self.retry_later(device)
        yield Failed(task.id, reason)

    def not_sent(self, device: Device, task: Task) -> None:
        """Close a task whose message the transport did not take."""
        self.back_off(device)
        self.run.in_flight.close_task(task.id)
        self.run.timers.push(self.run.now, Failed(task.id, "the message was not taken"))
        self.retry_later(device)

    def device_lost(self, device: Device, task: Task, reason: str) -> Iterable[Event]:
        """Keep a task open for `Timeouts.away` seconds after its device or its reply was lost.

        The device may return and have the reply by then. Others may take its place meanwhile.
        """
        run = self.run
        since = run.in_flight.lost_since.setdefault(task.id, run.now)
        if run.now - since >= run.timeouts.away:
            yield from self.failed(device, task, reason)
            return
        run.note("away", device=device.number, task=task.id, reason=reason)
        self.back_off(device)
        self.retry_later(device)
        waiting = InFlightMessage(0, -1, since, device.number, task.id, overdue=True)
        run.in_flight.unsent[task.id] = waiting
        if run.server.working.get(device.number) == task.id:
            yield from self.release(device)

    def release(self, device: Device) -> Iterable[Event]:
        """Let the device count neither as working nor as idle, while its task stays open."""
        yield self.run.joined(device)
        yield Left(device.number)

"""Introduction of nodes: which device is behind each connected node."""

from collections.abc import Iterable
from functools import partial

from latecomer.core.messages import Event, Left
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.device_registry import Device
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.task_dispatch import TaskDispatch
from latecomer.engines.timer_queue import BackOffOver
from latecomer.engines.transport import Delivery
from latecomer.engines.wire import Introduction, InvalidPayload, Payload, decode_introduction

QUERY = Payload({"latecomer": 1})


class Introductions:
    """Queries every new node for the name, key and width of its device, and registers them.

    A node that gives no valid introduction is queried again after a back-off.
    """

    def __init__(self, run: DeployedRun, dispatch: TaskDispatch) -> None:
        self.run, self.dispatch = run, dispatch

    def update_nodes(self, now: float) -> None:
        """Compare the connected nodes with the known ones: new ones are queried."""
        run = self.run
        present = set(run.transport.nodes())
        for node, device in run.registry.remove_absent(present):
            run.in_flight.busy.pop(node, None)
            if device is not None:
                run.timers.push(now, Left(device))
        for node in sorted(present - set(run.registry.nodes)):
            run.registry.nodes[node] = None
            self.query(node)

    def query(self, node: int) -> None:
        run = self.run
        if not run.registry.lacks_introduction(node):
            return
        known = run.codec.known(node)
        if known is not None:
            device = self._register(node, known)
            run.timers.push(max(run.now, device.back_off_until), BackOffOver(device.number))
            return
        message_id = run.transport.send(node, "query", QUERY)
        if message_id is None:
            self.failed(node, "the message was not taken")
            return
        query = InFlightMessage(run.timers.next_number(), node, run.now)
        run.in_flight.add(message_id, query)

    def answered(self, node: int, delivery: Delivery) -> Iterable[Event]:
        """Register the device that a reply introduces, and resume its task."""
        if node not in self.run.registry.nodes:
            return  # disconnected meanwhile: it is queried again when it is back
        try:
            if delivery.payload is None:
                raise InvalidPayload(delivery.error)
            introduction = decode_introduction(delivery.payload)
            if introduction.width not in self.run.submodels:
                raise InvalidPayload(f"there is no sub-model of width {introduction.width:g}")
            device = self._register(node, introduction)
        except InvalidPayload as error:
            self.failed(node, str(error))
            return
        if self.run.now >= device.back_off_until:
            yield from self.dispatch.resume(device)

    def failed(self, node: int, reason: str) -> None:
        """Query the node again after its back-off."""
        run = self.run
        failures = run.registry.failures[node] = run.registry.failures.get(node, 0) + 1
        run.note("refusal", node=node, reason=f"no introduction: {reason}")
        run.timers.push(run.now + run.timeouts.after(failures), partial(self.query, node))

    def _register(self, node: int, introduction: Introduction) -> Device:
        device, is_new = self.run.registry.register(node, introduction)
        if is_new:
            name, width = introduction.name, introduction.width
            self.run.note("introduction", device=device.number, name=name, width=width)
        else:
            self.run.note("return", device=device.number)
        return device

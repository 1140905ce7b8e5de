"""Evaluation of a model on devices, beside their training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from latecomer.core.checks import MAX_EXAMPLES, MAX_METRIC
from latecomer.core.messages import Event
from latecomer.engines.deployed_run import DeployedRun
from latecomer.engines.in_flight import InFlightMessage
from latecomer.engines.plain import decode_metrics
from latecomer.engines.task_dispatch import TaskDispatch
from latecomer.engines.transport import Delivery
from latecomer.engines.wire import InvalidPayload, Payload

MAX_FAILURES = 3  # in a row; a device with so many is not asked again


@dataclass(frozen=True, slots=True)
class EvaluationReply:
    """Metrics of a model on the data of one device; `round` is the one of its request."""

    round: int
    device: int
    examples: int
    metrics: dict[str, float]


class ClientEvaluations:
    """Sends evaluate messages to devices that are between two tasks.

    A node handles one message at a time: a device that trains gets its evaluation before its next
    task. Others go on meanwhile, and nothing waits for the reply. A new request replaces what was
    not sent of the last one. `on_reply` gets every valid reply.
    """

    def __init__(self, run: DeployedRun, dispatch: TaskDispatch) -> None:
        self.run, self.dispatch = run, dispatch
        self.on_reply: Callable[[EvaluationReply], None] = lambda reply: None
        self._waiting: dict[int, tuple[int, Payload]] = {}  # device -> round, message
        self._failures: dict[int, int] = {}  # by device, in a row

    def able(self) -> list[int]:
        """The connected devices that have not failed repeatedly."""
        return [
            number
            for number, device in self.run.registry.devices.items()
            if device.node is not None and self._failures.get(number, 0) < MAX_FAILURES
        ]

    def request(self, round: int, devices: Iterable[int], payload: Payload) -> None:
        """Evaluate the model in `payload` on these devices, each when it is free."""
        self._waiting = dict.fromkeys(devices, (round, payload))

    def are_open(self) -> bool:
        """Whether a connected device has not answered yet."""
        devices, messages = self.run.registry.devices, self.run.in_flight.open.values()
        return any(devices[number].node is not None for number in self._waiting) or any(
            message.round is not None for message in messages
        )

    def send_waiting(self) -> None:
        """Send the requests of all devices that are connected, free and not in back-off."""
        run = self.run
        for number, (round, payload) in list(self._waiting.items()):
            device = run.registry.devices[number]
            node = device.node
            if node is None or node in run.in_flight.busy or run.now < device.back_off_until:
                continue
            del self._waiting[number]
            message_id = run.transport.send(node, "evaluate", payload)
            if message_id is not None:
                sent = run.timers.next_number()
                message = InFlightMessage(sent, node, run.now, number, round=round)
                run.in_flight.add(message_id, message)

    def answered(self, message: InFlightMessage, delivery: Delivery) -> Iterable[Event]:
        """Record a reply, and resume the device's task."""
        self.record(message, delivery)
        device = self.run.registry.devices[message.device]
        if self.run.now >= device.back_off_until:
            yield from self.dispatch.resume(device)

    def record(self, message: InFlightMessage, delivery: Delivery) -> None:
        assert message.round is not None
        number, log = message.device, self.run.note
        try:
            if delivery.payload is None:
                raise InvalidPayload(delivery.error)
            examples, metrics = _checked(delivery.payload)
        except InvalidPayload as error:
            if not delivery.lost:
                self._failures[number] = self._failures.get(number, 0) + 1
            log("evaluation", device=number, round=message.round, reason=str(error))
            return
        self._failures.pop(number, None)
        log("evaluation", device=number, round=message.round, examples=examples, metrics=metrics)
        self.on_reply(EvaluationReply(message.round, number, examples, metrics))


def _checked(payload: Payload) -> tuple[int, dict[str, float]]:
    """Examples and metrics of a reply; InvalidPayload if one of them is out of bounds."""
    examples, metrics = decode_metrics(payload)
    if type(examples) is not int or not 1 <= examples <= MAX_EXAMPLES:
        raise InvalidPayload(f"num-examples must be a whole number from 1 to {MAX_EXAMPLES:,}")
    if not all(type(v) in (int, float) and abs(v) <= MAX_METRIC for v in metrics.values()):
        raise InvalidPayload("a metric is not a finite number")
    return examples, metrics

"""A `Transport` over Flower's `Grid`, for the server of a deployment. Needs the extra `flower`.

Uses only the public interface of Flower 1.38 or later, which is imported on first use.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from latecomer.engines.transport import Delivery, Kind
from latecomer.engines.wire import Packed, Payload

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

MAX_POLL_RATE = 50.0  # per second, over all open messages; a SuperLink answers about 90
# Names of the records in a message. Other Flower apps use the last three.
FIELDS, METRICS, ARRAYS, CONFIG = "latecomer", "metrics", "arrays", "config"
MODEL = "model"  # the only array of a Latecomer message
NUMPY = "numpy.ndarray"  # what Flower calls the .npy format
MAX_TTL = 14 * 86400.0
# Flower's error codes are not public: these were observed.
RAISED = "the client raised an error"
ERRORS = {
    2: RAISED,
    3: "the message is not available any more",
    5: "the node is not available",
    8: "the client process has crashed",
}
LOST = (3, 5)  # the message or the node was lost: no error of the device


def to_records(payload: Payload) -> "RecordDict":
    """A payload as Flower records; named arrays in the form that any Flower app expects."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    def arrays(named: Mapping[str, Packed]) -> ArrayRecord:
        return ArrayRecord({n: Array(p.dtype, p.shape, NUMPY, p.data) for n, p in named.items()})

    if payload.named:
        return RecordDict(
            {ARRAYS: arrays(payload.named), CONFIG: ConfigRecord(dict(payload.fields))}
        )
    records = RecordDict({FIELDS: ConfigRecord(dict(payload.fields))})
    if payload.metrics:
        records[METRICS] = MetricRecord(dict(payload.metrics))
    if payload.array is not None:
        records[ARRAYS] = arrays({MODEL: payload.array})
    return records


def from_records(records: "RecordDict") -> Payload:
    """The payload in received records; missing records and records of another type are left empty.

    The records of other Flower apps may have any name, if there is one of each type.
    """
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

    fields, arrays = records.get(FIELDS), only(records, ArrayRecord)
    named = {
        name: Packed(array.dtype, tuple(array.shape), array.data)
        for name, array in (arrays or {}).items()
        if array.stype == NUMPY
    }
    return Payload(
        dict(fields) if isinstance(fields, ConfigRecord) else {},
        dict(only(records, MetricRecord) or {}),
        named[MODEL] if list(named) == [MODEL] else None,
        named,
    )


def only(records: "RecordDict", kind: type) -> Any:
    """The record of this type; None if there is none, or more than one."""
    found = [record for record in records.values() if isinstance(record, kind)]
    return found[0] if len(found) == 1 else None


def error_of(message: "Message") -> str:
    """Why there is no reply, in one line."""
    error = message.error
    what = ERRORS.get(error.code, f"error {error.code}")
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    # The last line of a traceback names the error.
    return f"{what}: {lines[-1][:200]}" if lines else what


class GridTransport:
    """Sends payloads through a Flower `Grid` and collects the replies.

    poll: seconds between two requests for the same reply. A reply that waits at the SuperLink is
        lost if its node disconnects. With many open messages the interval grows, so that all
        together make at most MAX_POLL_RATE requests per second.
    ttl: seconds that a message stays valid.

    Every open message has its own thread, so that a slow upload delays no other reply.
    """

    def __init__(self, grid: "Grid", poll: float = 0.5, ttl: float = MAX_TTL) -> None:
        self.grid, self.poll, self.ttl = grid, poll, ttl
        # Flower's simulation handles several messages to one node concurrently.
        self.serial = "InMemory" not in type(grid).__name__
        self._inbox: Queue[Delivery] = Queue()
        self._open: dict[str, threading.Event] = {}
        self._last_nodes: Collection[int] = ()

    def now(self) -> float:
        return time.monotonic()

    def nodes(self) -> Collection[int]:
        found = self._tried("ask for nodes", lambda: list(self.grid.get_node_ids()))
        if found is not None:
            self._last_nodes = found
        return self._last_nodes

    def send(self, node: int, kind: Kind, payload: Payload) -> str | None:
        from flwr.app import Message

        message = Message(to_records(payload), node, kind, ttl=self.ttl)
        pushed = self._tried("push a message", lambda: set(self.grid.push_messages([message])))
        number = str(message.metadata.message_id)
        if not pushed or not number or number not in pushed:
            return None
        stop = self._open[number] = threading.Event()
        name = f"reply-of-node-{node}"
        threading.Thread(
            target=self._fetch, args=(node, number, stop), name=name, daemon=True
        ).start()
        return number

    def _fetch(self, node: int, number: str, stop: threading.Event) -> None:
        """Poll until the reply is there."""
        while not stop.wait(max(self.poll, len(self._open) / MAX_POLL_RATE)):
            found = self._tried("pull a reply", lambda: list(self.grid.pull_messages([number])))
            for reply in found or ():
                if reply.metadata.reply_to_message_id == number:
                    self._inbox.put(_delivery(node, number, reply))
                    return

    def collect(self, until: float) -> list[Delivery]:
        found: list[Delivery] = []
        try:
            found.append(self._inbox.get(timeout=max(0.0, until - self.now())))
            while True:
                found.append(self._inbox.get_nowait())
        except Empty:
            pass
        for delivery in found:
            self._open.pop(delivery.message, None)
        return found

    def forget(self, message: str) -> None:
        stop = self._open.pop(message, None)
        if stop is not None:
            stop.set()

    def close(self) -> None:
        for message in list(self._open):
            self.forget(message)

    def _tried(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of a call to the SuperLink; None, with a warning, if it fails."""
        try:
            return call()
        except Exception as error:  # any error of Flower's transport
            log.warning("could not %s: %s", what, error)
            return None


def _delivery(node: int, number: str, reply: "Message") -> Delivery:
    try:
        if reply.has_error():
            # Errors can come from the SuperLink itself: their source node is not checked.
            return Delivery(number, error=error_of(reply), lost=reply.error.code in LOST)
        if reply.metadata.src_node_id != node:
            return Delivery(number, error="the reply is from another node")
        return Delivery(number, from_records(reply.content))
    except Exception as error:  # a malformed reply can raise anything in Flower's code
        return Delivery(number, error=f"the reply cannot be read: {error}")

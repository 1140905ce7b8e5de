"""Flower's `Grid` as a `Transport`: the server side of a deployment. Needs the extra `flower`.

Only Flower's public interface is used (1.38 or later). Flower is imported when it is needed.
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

MOST_POLLS = 50.0  # a second, for all open messages together; a SuperLink answers about 90
# The names of the records in a message; other Flower apps use the last two, and have a config.
FIELDS, METRICS, ARRAYS = "latecomer", "metrics", "arrays"
CONFIG = "config"
MODEL = "model"  # our one array
NUMPY = "numpy.ndarray"  # Flower's word for .npy
LONGEST_TTL = 14 * 86400.0
# Flower's error codes are private: these are numbers that were seen.
ERRORS = {
    2: "the client raised an error",
    3: "the message is not available any more",
    5: "the node is not available",
    8: "the client process has crashed",
}
LOST = (3, 5)  # of these, what the device knows nothing of


def to_records(payload: Payload) -> "RecordDict":
    """The payload as Flower's records; one with named arrays as any Flower app expects them."""
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
    """What came, as it came: records that are missing or of another kind leave gaps.

    Other Flower apps may call their records what they like, if there is one of each kind.
    """
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

    told, arrays = records.get(FIELDS), only(records, ArrayRecord)
    named = {
        name: Packed(array.dtype, tuple(array.shape), array.data)
        for name, array in (arrays or {}).items()
        if array.stype == NUMPY
    }
    return Payload(
        dict(told) if isinstance(told, ConfigRecord) else {},
        dict(only(records, MetricRecord) or {}),
        named[MODEL] if list(named) == [MODEL] else None,
        named,
    )


def only(records: "RecordDict", kind: type) -> Any:
    """The record of this kind; None if there is none, or more than one."""
    found = [record for record in records.values() if isinstance(record, kind)]
    return found[0] if len(found) == 1 else None


def error_of(message: "Message") -> str:
    """Why there is no reply, in a line."""
    error = message.error
    what = ERRORS.get(error.code, f"error {error.code}")
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    # The last line of a traceback is the one that says it.
    return f"{what}: {lines[-1][:200]}" if lines else what


class GridTransport:
    """Carries payloads over a `Grid`.

    Every open message has a thread of its own that asks for its reply: one node that uploads
    slowly, or stops in the middle, keeps nobody else waiting. A reply is fetched within `poll`
    seconds, because one that waits is lost if its node goes offline; with many open messages they
    take turns, so that the SuperLink has time for its nodes.
    """

    def __init__(self, grid: "Grid", poll: float = 0.5, ttl: float = LONGEST_TTL) -> None:
        self.grid, self.poll, self.ttl = grid, poll, ttl
        # In Flower's simulation several messages to one node are handled side by side.
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
        """Ask until the reply is there."""
        while not stop.wait(max(self.poll, len(self._open) / MOST_POLLS)):
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
        """The SuperLink may be away for a while: the next attempt will tell."""
        try:
            return call()
        except Exception as error:  # whatever the transport raises
            log.warning("could not %s: %s", what, error)
            return None


def _delivery(node: int, number: str, reply: "Message") -> Delivery:
    try:
        if reply.has_error():
            # What the SuperLink itself reports comes from it, whoever was asked.
            return Delivery(number, error=error_of(reply), lost=reply.error.code in LOST)
        if reply.metadata.src_node_id != node:
            return Delivery(number, error="another node has answered")
        return Delivery(number, from_records(reply.content))
    except Exception as error:  # whatever a hostile reply provokes in Flower's own code
        return Delivery(number, error=f"the reply cannot be read: {error}")

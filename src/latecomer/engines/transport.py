"""The interface of what carries messages between the deployment loop and nodes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from latecomer.engines.wire import Payload

# A query asks for the introduction of the node's device.
Kind = Literal["query", "train", "evaluate"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The reply to a message; without a payload, the `error` because of which there is none.

    `lost`: the message, its reply or the node was lost on the way; the device made no error.
    """

    message: str
    payload: Payload | None = None
    error: str = ""
    lost: bool = False


class Transport(Protocol):
    """Sends payloads to nodes, collects their replies, and has the clock.

    No method raises for a fault of a node or of the network. `serial`: a node handles one message
    at a time.
    """

    serial: bool

    def now(self) -> float:
        """Seconds since an arbitrary fixed moment."""

    def nodes(self) -> Collection[int]:
        """The nodes that are connected."""

    def send(self, node: int, kind: Kind, payload: Payload) -> str | None:
        """Send a message and return its id; None if it was not taken."""

    def collect(self, until: float) -> list[Delivery]:
        """Wait for the next replies, at most until `until`; all that arrived at that moment."""

    def forget(self, message: str) -> None:
        """Expect no reply to this message any more."""

    def close(self) -> None:
        """Expect no reply to any message any more."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the deployment loop waits for nodes, introductions and replies, in seconds.

    poll: the longest wait for replies before timers are checked again.
    node_poll: between two queries of the list of connected nodes.
    introduction: for the reply of a new node to the query for its device.
    overdue: for a reply to a task, before another device may take the place of this one; for a
        reply to an evaluation, before it is given up.
    probe: for a reply, before the node is queried whether it still has the task.
    grace: after the reply to a probe, for a reply that was sent before it.
    away: for a device that was lost with a task, before the task is closed.
    give_up: for a reply, before its task is closed.
    back_off: without messages to a device after a failure, doubled with every further one.
    max_back_off: the longest back-off.
    """

    poll: float = 1.0
    node_poll: float = 2.0
    introduction: float = 300.0
    overdue: float = 3600.0
    probe: float = 300.0
    grace: float = 10.0
    away: float = 300.0
    give_up: float = 7 * 86400.0
    back_off: float = 5.0
    max_back_off: float = 3600.0

    def after(self, failures: int) -> float:
        """The back-off after this many failures in a row."""
        return float(min(self.back_off * 2.0 ** min(failures - 1, 60), self.max_back_off))

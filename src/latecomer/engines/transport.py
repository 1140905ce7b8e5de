"""The interface of what carries messages between the deployment loop and nodes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from latecomer.engines.wire import Payload

Kind = Literal["query", "train"]  # a query asks for the introduction of the node's device


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

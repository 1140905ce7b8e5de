"""What the federation loop needs of whatever carries its messages."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from latecomer.engines.wire import Payload

Kind = Literal["hello", "train"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The reply to a message, or, without a payload, the news that there will be none.

    `lost`: the message or its reply went astray, or the node did. Its device has refused nothing.
    """

    message: str
    payload: Payload | None = None
    error: str = ""
    lost: bool = False


class Transport(Protocol):
    """Carries payloads to nodes and brings back replies. It has the clock, too.

    Nothing here raises for what a node does or for a network that is away. `serial` tells that a
    node handles one message at a time.
    """

    serial: bool

    def now(self) -> float:
        """Seconds since any fixed moment."""

    def nodes(self) -> Collection[int]:
        """The nodes that can be written to at present."""

    def send(self, node: int, kind: Kind, payload: Payload) -> str | None:
        """The id of the message; None if it was not taken."""

    def collect(self, until: float) -> list[Delivery]:
        """All replies of the next moment there are any; none if there are none by `until`."""

    def forget(self, message: str) -> None:
        """Nobody waits for a reply to this message any more."""

    def close(self) -> None:
        """Nobody waits for any reply any more."""

"""Who is behind the nodes: a node is a connection, a device has a name of its own."""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from latecomer.engines.wire import Introduction, InvalidPayload

MOST_DEVICES = 1_000_000  # names are kept for ever: nobody may make them up without end


@dataclass(slots=True)
class Device:
    """Who has introduced itself under a name."""

    number: int
    proof: str  # sha256 of its key
    width: float
    node: int | None = None
    failures: int = 0
    waits_until: float = 0.0  # no message to it before


class DeviceRegistry:
    """The devices that are known, by name and by number, and the nodes that are there."""

    def __init__(self) -> None:
        self.names: dict[str, Device] = {}
        self.devices: dict[int, Device] = {}
        self.nodes: dict[int, int | None] = {}  # node -> device, None: not introduced
        self.failures: dict[int, int] = {}  # of nodes, in saying who they are

    def gone(self, present: Iterable[int]) -> Iterable[tuple[int, int | None]]:
        """The nodes that are there no longer, each with the number of the device that has left."""
        there = set(present)
        for node in [node for node in self.nodes if node not in there]:
            number = self.nodes.pop(node)
            self.failures.pop(node, None)
            if number is not None and self.devices[number].node == node:
                self.devices[number].node = None
                yield node, number
            else:
                yield node, None

    def unknown(self, node: int) -> bool:
        """Whether this node is there and has not said who it is."""
        return node in self.nodes and self.nodes[node] is None

    def introduced(self, node: int, who: Introduction) -> tuple[Device, bool]:
        """The device behind this node from now on, and whether its name is new.

        A node that it had before may be listed for a while yet: it is not asked again.
        """
        proof = sha256(who.key.encode()).hexdigest()
        known = self.names.get(who.name)
        if known is not None and not hmac.compare_digest(known.proof, proof):
            raise InvalidPayload(f"device {known.number} has this name, and another key")
        if known is None and len(self.names) >= MOST_DEVICES:
            raise InvalidPayload(f"there are {MOST_DEVICES:,} devices already")
        device = known or Device(len(self.names), proof, who.width)
        self.names[who.name] = self.devices[device.number] = device
        device.node, device.width = node, who.width
        self.nodes[node] = device.number
        self.failures.pop(node, None)
        return device, known is None

    def state(self) -> dict[str, Any]:
        return {name: [d.number, d.proof, d.width] for name, d in self.names.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.names = {name: Device(*fields) for name, fields in state.items()}
        self.devices = {device.number: device for device in self.names.values()}

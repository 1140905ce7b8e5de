"""Devices by name and number, and the node (Flower connection) that each is connected through."""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from latecomer.engines.wire import Introduction, InvalidPayload

MAX_DEVICES = 1_000_000  # names are kept for the whole run: bounds the memory they can take


@dataclass(slots=True)
class Device:
    """A device that has introduced itself under a name."""

    number: int
    key_hash: str  # sha256 of its secret key
    width: float
    node: int | None = None  # None: not connected
    failures: int = 0  # in a row
    back_off_until: float = 0.0  # seconds of the run's clock; no message is sent before


class DeviceRegistry:
    """All devices that were ever introduced, and all connected nodes."""

    def __init__(self) -> None:
        self.names: dict[str, Device] = {}
        self.devices: dict[int, Device] = {}
        self.nodes: dict[int, int | None] = {}  # node -> device; None: not yet introduced
        self.failures: dict[int, int] = {}  # failed introductions of a node, in a row

    def remove_absent(self, present: Iterable[int]) -> Iterable[tuple[int, int | None]]:
        """Remove nodes that are not `present`; yields each with its device, None if it has none."""
        there = set(present)
        for node in [node for node in self.nodes if node not in there]:
            number = self.nodes.pop(node)
            self.failures.pop(node, None)
            if number is not None and self.devices[number].node == node:
                self.devices[number].node = None
                yield node, number
            else:
                yield node, None

    def lacks_introduction(self, node: int) -> bool:
        """Whether this node is connected and its device unknown."""
        return node in self.nodes and self.nodes[node] is None

    def register(self, node: int, introduction: Introduction) -> tuple[Device, bool]:
        """The device behind this node from now on, and whether its name is new.

        InvalidPayload if the name belongs to another key. The device's earlier node may stay
        listed for a while; no message goes to it.
        """
        key_hash = sha256(introduction.key.encode()).hexdigest()
        known = self.names.get(introduction.name)
        if known is not None and not hmac.compare_digest(known.key_hash, key_hash):
            raise InvalidPayload(f"device {known.number} has this name and another key")
        if known is None and len(self.names) >= MAX_DEVICES:
            raise InvalidPayload(f"there are {MAX_DEVICES:,} devices already")
        device = known or Device(len(self.names), key_hash, introduction.width)
        self.names[introduction.name] = self.devices[device.number] = device
        device.node, device.width = node, introduction.width
        self.nodes[node] = device.number
        self.failures.pop(node, None)
        return device, known is None

    def state(self) -> dict[str, Any]:
        return {name: [d.number, d.key_hash, d.width] for name, d in self.names.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.names = {name: Device(*fields) for name, fields in state.items()}
        self.devices = {device.number: device for device in self.names.values()}

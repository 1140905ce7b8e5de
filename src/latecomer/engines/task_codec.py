"""Conversion of tasks to payloads and of replies to updates, for one kind of devices."""

from collections.abc import Mapping
from typing import Protocol

from latecomer.core.messages import ServingSettings, Task, Update
from latecomer.core.server import Server
from latecomer.engines.wire import Introduction, Payload, decode_update, encode_task


class TaskCodec(Protocol):
    """The message format of the devices of a deployment."""

    def check(self, server: Server) -> None:
        """BadInput if devices with this format cannot do what the strategy needs."""

    def known(self, node: int) -> Introduction | None:
        """The device behind this node; None if the node must be queried."""

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, serving: ServingSettings | None = None
    ) -> Payload:
        """The message with the task; for `key`, `run`, `until` and `serving` see `wire.Order`."""

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        """The update in a reply to this task; InvalidPayload if it does not match the task.

        `newer` maps the number of each broadcast sent during the task to its unique id.
        """


class NativeCodec:
    """The format of devices that run Latecomer, for all strategies; nodes are queried."""

    def check(self, server: Server) -> None: ...

    def known(self, node: int) -> None:
        return None

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, serving: ServingSettings | None = None
    ) -> Payload:
        return encode_task(task, key, run, until, serving)

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        return decode_update(payload, task, key, newer)

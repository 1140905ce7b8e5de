"""How tasks and answers are worded for the devices of a deployment."""

from collections.abc import Mapping
from typing import Protocol

from latecomer.core.messages import ServingSettings, Task, Update
from latecomer.core.server import Server
from latecomer.engines.wire import Introduction, Payload, decode_update, encode_task


class TaskCodec(Protocol):
    """What the federation loop and its devices understand each other by."""

    def check(self, server: Server) -> None:
        """BadInput if devices that speak it cannot do what the strategy asks of them."""

    def known(self, node: int) -> Introduction | None:
        """Who is behind this node, if it need not be asked."""

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, use: ServingSettings | None = None
    ) -> Payload:
        """The message that gives the task to its device; `until` if it is done in parts.

        `use` is for between the tasks.
        """

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        """What the device has answered; InvalidPayload if it is no answer to this task.

        `newer` names the broadcasts that the device was sent, by their numbers.
        """


class NativeCodec:
    """Devices that run Latecomer: they have names, and do all that a strategy may ask for."""

    def check(self, server: Server) -> None: ...

    def known(self, node: int) -> None:
        return None

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, use: ServingSettings | None = None
    ) -> Payload:
        return encode_task(task, key, run, until, use)

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        return decode_update(payload, task, key, newer)

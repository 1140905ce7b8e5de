"""Conversion of tasks to payloads and of replies to updates, for one kind of devices."""

from collections.abc import Mapping

from latecomer.core.messages import ServingSettings, Task, Update
from latecomer.core.server import Server
from latecomer.engines.wire import PLAIN, Introduction, Payload, decode_update, encode_task


class TaskCodec:
    """The message format of devices that run Latecomer; subclasses have those of other devices."""

    def check(self, server: Server) -> None:
        """BadInput if devices with this format cannot do what the strategy needs."""

    def known(self, node: int) -> Introduction | None:
        """The device behind this node; None if the node must be queried."""
        return None

    def encode(
        self, task: Task, key: str, run: str, until: int = 0, serving: ServingSettings = PLAIN
    ) -> Payload:
        """The message with the task; for `key`, `run`, `until` and `serving` see `wire.Order`."""
        return encode_task(task, key, run, until, serving)

    def decode(self, payload: Payload, task: Task, key: str, newer: Mapping[int, str]) -> Update:
        """The update in a reply to this task; InvalidPayload if it does not match the task.

        `newer` maps the number of each broadcast sent during the task to its unique id.
        """
        return decode_update(payload, task, key, newer)

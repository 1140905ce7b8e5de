"""What all grids of virtual time share: numbers of nodes, and messages without a Flower run."""

from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from latecomer.errors import RunFailed

FIRST_NODE = 1000  # the node of device 0; Flower reserves small numbers


class SimulatedGrid(Grid):  # type: ignore[misc, unused-ignore]  # without Flower it is Any
    """A grid without a Flower run; subclasses say what happens to messages."""

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise RunFailed("there is no Flower run in virtual time")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

"""Private parts of Flower that are needed to create messages outside of Flower's processes.

A Flower strategy in virtual time creates its messages in our process. Observed in flwr 1.41;
versions without these parts do not need them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message

FIELDS = ("_task_id", "_run_id", "_node_id")


@contextmanager
def allow_messages() -> Iterator[None]:
    """Set the task identity that Flower sets before it runs an app."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # before 1.40 nothing was needed
        yield
        return
    before = {name: getattr(TaskIdentity, name, None) for name in FIELDS}
    for name in FIELDS:
        setattr(TaskIdentity, name, 1)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def set_message_id(message: "Message", name: str) -> None:
    """Set the id of a message, as Flower's grids do."""
    message.metadata.__dict__["_message_id"] = name


def of_earlier_kind(app: object) -> bool:
    """Whether an app is made of a client_fn or server_fn, instead of functions of messages."""
    return getattr(app, "_call", None) is not None or getattr(app, "_main", app) is None

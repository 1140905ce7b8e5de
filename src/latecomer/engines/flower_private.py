"""All that is used of Flower's private interface. Seen in flwr 1.41; where it is absent, unused.

Messages can be made in Flower's own processes only. A strategy of Flower's that runs in virtual
time makes its messages in ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message

FIELDS = ("_task_id", "_run_id", "_node_id")


@contextmanager
def may_make_messages() -> Iterator[None]:
    """What Flower sets before it runs an app."""
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


def number(message: "Message", name: str) -> None:
    """Give a message its id, as Flower's own grids do."""
    message.metadata.__dict__["_message_id"] = name

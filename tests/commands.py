"""What a server's commands come to, for tests that drive it by hand."""

from collections.abc import Iterable

from latecomer.core.messages import Command, Send, Task


def sends(commands: Iterable[Command]) -> list[Task]:
    """The tasks that are handed out."""
    return [c.task for c in commands if isinstance(c, Send)]

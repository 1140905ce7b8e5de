"""Reading a server's commands, for tests that drive it by hand."""

from collections.abc import Iterable

from latecomer.core.messages import Command, Send, Task
from latecomer.core.outcomes import Note, Outcome


def sends(commands: Iterable[Command]) -> list[Task]:
    """The tasks that are handed out."""
    return [c.task for c in commands if isinstance(c, Send)]


def logged(commands: Iterable[Command], kind: str) -> list[dict]:
    """The fields of all log lines of that kind."""
    return [dict(c.fields) for c in commands if isinstance(c, Outcome | Note) and c.kind == kind]

"""Errors with a one-line message and an exit code."""

from collections.abc import Collection
from difflib import get_close_matches


class BadInput(ValueError):
    """Bad usage, config or data, said in one line: what, where, what is allowed. Exit code 2."""


class RunFailed(RuntimeError):
    """The run could not go on; what was done so far is on disk. Exit code 1."""


class Interrupted(RunFailed):
    """The user ended the run; it can be resumed."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint at the nearest known name, to append to a message; empty if none is near."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(what: str, name: str, known: Collection[str], more: str = "") -> BadInput:
    """The error for a name that is none of the known ones."""
    allowed = ", ".join([*known, *([more] if more else [])])
    return BadInput(f"{what} {name!r} is unknown{did_you_mean(name, known)} (allowed: {allowed})")

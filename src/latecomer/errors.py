"""Errors with a one-line message and an exit code."""

from collections.abc import Collection
from difflib import get_close_matches

SIMILAR = 0.6  # difflib's ratio of two names from which one may be a slip for the other


class BadInput(ValueError):
    """Bad usage, config or data, said in one line: what, where, what is allowed. Exit code 2."""


class RunFailed(RuntimeError):
    """The run could not go on; what was done so far is on disk. Exit code 1."""


class Interrupted(RunFailed):
    """The user ended the run; it can be resumed."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A hint at the nearest known name, to append to a message; empty if none is near."""
    lower = {each.lower(): each for each in known}
    cutoff = SIMILAR if len(name) > 3 else 0.5  # one slip in two letters
    near = get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def unknown(what: str, name: str, known: Collection[str], more: str = "") -> BadInput:
    """The error for a name that is none of the known ones."""
    allowed = ", ".join([*known, *([more] if more else [])])
    return BadInput(f"{what} {name!r} is unknown{did_you_mean(name, known)} (allowed: {allowed})")

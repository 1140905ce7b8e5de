"""How to say that a name is not known."""

from collections.abc import Collection
from difflib import get_close_matches

from latecomer.errors import BadInput


def unknown(key: str, name: str, known: Collection[str]) -> BadInput:
    """The error for a name that is none of the known ones, with the nearest of them."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f", nearest is {near[0]!r}" if near else ""
    return BadInput(f"{key} {name!r} is unknown{hint}; allowed are {', '.join(known)}")

"""What users write: callables named as `module:callable`, their errors, and nested tables."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

from latecomer.errors import BadInput


def load_callable(name: str, what: str) -> Callable[..., Any]:
    """Import `module:callable`; modules in the current directory are found too."""
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        raise BadInput(f"{what} '{name}': write your own as module:callable, e.g. mine:make")
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(place)
    except Exception as error:
        raise BadInput(
            f"{what} '{name}': cannot import '{place}' (looked in {here} and the installed "
            f"packages): {first_line(error)}"
        ) from error
    finally:
        sys.path.remove(here)
    found = getattr(module, attribute, None)
    if not callable(found):
        problem = "has no" if found is None else "has a non-callable"
        raise BadInput(f"{what} '{name}': module '{place}' {problem} '{attribute}'")
    return found  # type: ignore[no-any-return]


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a one-line message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def at(error: BaseException) -> str:
    """File and line where an error was raised, in parentheses, to append to its first line."""
    frame = extract_tb(error.__traceback__)[-1]
    return f" (at {Path(frame.filename).name}:{frame.lineno})"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping)
        found |= dotted(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return found

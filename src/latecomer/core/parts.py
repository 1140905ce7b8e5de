"""The parts of one run: a private copy of the strategy, and the hooks of everything in it.

A part is any object with a hook of `core.strategy.Observer` that can be reached from the
strategy's slots and observers through attributes, bound methods, `functools.partial`, tuples,
lists and dicts. Each is found once, by the path of attributes that leads to it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, MethodType
from typing import Any, TypeVar

from latecomer.core.strategy import Action, Observer, ServerView, Strategy
from latecomer.errors import BadInput

Value = TypeVar("Value")

HOOKS = ("on_arrival", "on_contribution", "on_commit", "on_fork", "on_absorb", "on_timer", "act")
FOLDS = ("deployed", "serving")  # hooks that get a value and return a new one
SLOTS = ("route", "compensate", "weigh", "merge", "dispatch", "observers")
# Attributes of these are data, not parts.
DATA = ("builtins", "numpy", "torch", "collections", "array")


def _calls(name: str) -> Callable[..., None]:
    """A method that calls the hook `name` of every part."""

    def call(self: "Parts", *given: Any) -> None:
        for hook in self.hooks[name]:
            hook(*given)

    return call


class Parts:
    """Calls the hooks of all parts of `strategy`, a deep copy of the strategy it was given."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = _copied(strategy)
        self.by_path: dict[str, Any] = {}
        self._seen: set[int] = set()
        for slot in SLOTS:
            self._find(slot, getattr(self.strategy, slot))
        found = self.by_path.values()
        self.hooks = {n: [m for p in found if (m := _hook(p, n))] for n in (*HOOKS, *FOLDS)}

    @property
    def broadcasts(self) -> bool:
        """Whether a part may send newer models to working devices."""
        return any(
            getattr(part, "broadcasts", True)
            for part in self.by_path.values()
            if _hook(part, "act")
        )

    on_arrival = _calls("on_arrival")
    on_contribution = _calls("on_contribution")
    on_commit = _calls("on_commit")
    on_fork = _calls("on_fork")
    on_absorb = _calls("on_absorb")
    on_timer = _calls("on_timer")

    def folded(self, name: str, value: Value, *given: Any) -> Value:
        """`value` after the hook `name` of every part."""
        for hook in self.hooks[name]:
            value = hook(value, *given)
        return value

    def act(self, view: ServerView) -> Iterable[Action]:
        """The actions of all parts; each part sees the effects of those before it."""
        for hook in self.hooks["act"]:
            yield from hook(view)

    def state(self) -> dict[str, Any]:
        return {path: part.state() for path, part in self._stateful()}

    def restore(self, state: Mapping[str, Any]) -> None:
        parts = dict(self._stateful())
        if parts.keys() != state.keys():
            theirs, ours = (", ".join(some) or "none" for some in (state, parts))
            raise ValueError(f"it has state for {theirs}; this strategy has {ours}")
        for path, part in parts.items():
            part.restore(state[path])

    def _stateful(self) -> Iterable[tuple[str, Any]]:
        return (found for found in self.by_path.items() if _hook(found[1], "state"))

    def _find(self, path: str, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._find(path, value.__self__)
        elif isinstance(value, functools.partial):
            for place, each in enumerate((value.func, *value.args, *value.keywords.values())):
                self._find(f"{path}.{place}", each)
        elif isinstance(value, FunctionType):
            self._check_closure(path, value)
        elif isinstance(value, tuple | list | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for place, each in items:
                self._find(f"{path}.{place}", each)
        elif type(value).__module__.partition(".")[0] not in DATA:
            if any(_hook(value, name) for name in (*HOOKS, *FOLDS, "state")):
                self.by_path[path] = value
            for name, each in getattr(value, "__dict__", {}).items():
                self._find(f"{path}.{name}", each)

    def _check_closure(self, path: str, function: FunctionType) -> None:
        """A function is shared by all copies of a strategy, so nothing in it may have state."""
        for name, kept in inspect.getclosurevars(function).nonlocals.items():
            before = len(self.by_path)
            self._find(f"{path}.{name}", kept)
            if len(self.by_path) > before:
                raise BadInput(
                    f"strategy '{self.strategy.name}': the function in {path} keeps the part"
                    f" {name!r}, whose state would be shared by all runs; use a class that holds"
                    " the part as an attribute"
                )


def _hook(part: Any, name: str) -> Callable[..., Any] | None:
    """The part's method of that name, unless it is an inherited one without effect."""
    found = getattr(type(part), name, None)
    inherited = getattr(Observer, name, None)
    if found is None or (found is inherited and not (name == "state" and part.kept)):
        return None
    return getattr(part, name)  # type: ignore[no-any-return]


def _copied(strategy: Strategy) -> Strategy:
    try:
        return copy.deepcopy(strategy)
    except Exception as error:
        raise BadInput(
            f"strategy '{strategy.name}' cannot be copied for a run ({error}); give a function that"
            " makes it instead"
        ) from error

"""The registry of recipes: strategies by name, and the validation of their options."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from latecomer.core.strategy import Strategy
from latecomer.errors import BadInput, did_you_mean, unknown
from latecomer.loading import first_line, load_callable
from latecomer.strategies.parts.flower_rounds import FlowerStrategy, from_flower

Build = Callable[..., Strategy]

# Options of earlier versions, by strategy: the new name of each; with a dot, a key of the config.
RENAMED = {
    "latecomer": {
        "repair": "compensate",
        "stand_in": "surrogates",
        "keep": "personalise.finetune_epochs",
        "mix": "personalise.prior",
        "personalise": "personalise.prior",
    },
    "feddc": {"stand_in": "surrogates", "keep": "mask"},
    "feddc-fedasync": {"keep": "mask"},
    "feddc-fedbuff": {"keep": "mask"},
    "echopfl": {"judge": "measure", "most": "max_ratio"},
    "oort": {"explore_least": "explore_min", "most_turns": "max_participations"},
    "clusterfl": {"probes": "inputs"},
    "robust-fedbuff": {"voices": "votes_per"},
}

# Options that have been removed, by strategy: what replaces each.
REMOVED = {
    "latecomer": {
        "clusters": "echopfl forms clusters, ifca and clusterfl too",
        "calibrate": "personalise.prior corrects for the class prior of a device",
    },
}


@dataclass(frozen=True)
class Recipe:
    """A strategy that can be named in a config; the parameters of `build` are its options.

    of: functions whose options are options of this recipe too, such as another recipe's `build`.
        Their results are the first arguments of `build`. A parameter of `build` without a default
        gets the value of their option of that name.
    pooled: one device trains on the data of all (a reference).
    punctual: the delay of `fleet.late` is left out (a reference).
    widths: slow devices train sub-models unless the config has other widths.
    private: meant for local differential privacy.
    """

    name: str
    summary: str
    paper: str
    build: Build
    of: tuple[Callable[..., Any], ...] = ()
    pooled: bool = False
    punctual: bool = False
    widths: bool = False
    private: bool = False

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The options by name."""
        own = _parameters(self.build)[len(self.of) :]
        inherited = {p.name: p for each in self.of for p in _parameters(each)}
        named = {p.name: p for p in own if p.default is not p.empty or p.name not in inherited}
        return named | inherited

    def make(self, options: Mapping[str, Any]) -> Strategy:
        """A new strategy; an error or another result of a user's factory gives one clear line."""
        try:
            given = [each(**_chosen(each, options)) for each in self.of]
            own = _chosen(self.build, options) if given else options
            strategy = self.build(*given, **own)
        except BadInput:
            raise
        except Exception as error:
            message = f"strategy '{self.name}': calling it failed: {first_line(error)}"
            raise BadInput(message) from error
        if isinstance(strategy, FlowerStrategy):
            return from_flower(strategy, name=self.name)
        if not isinstance(strategy, Strategy):
            kind = type(strategy).__name__
            raise BadInput(
                f"strategy '{self.name}': gave a {kind}, must give a Strategy, or one of Flower's"
            )
        return strategy


_REGISTERED: dict[str, Recipe] = {}


def recipe(
    name: str,
    summary: str,
    paper: str,
    of: tuple[Callable[..., Any], ...] = (),
    pooled: bool = False,
    punctual: bool = False,
    widths: bool = False,
    private: bool = False,
) -> Callable[[Build], Build]:
    """Register the decorated factory under `name`. All modules of this package are imported."""

    def register(build: Build) -> Build:
        made = Recipe(name, summary, paper, build, of, pooled, punctual, widths, private)
        _REGISTERED[name] = made
        return build

    return register


def recipes() -> Mapping[str, Recipe]:
    """All registered recipes, by name."""
    _discover()
    return dict(sorted(_REGISTERED.items()))


@cache
def _discover() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or of a user's factory given as `module:callable`."""
    known = recipes()
    if name in known:
        return known[name]
    if ":" in name:
        return Recipe(name, "your own", "", load_callable(name, "strategy"))
    raise unknown("strategy", name, known, "your own as module:callable")


def build_strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """A new strategy with validated options."""
    found = find_recipe(name)
    return found.make(resolve_options(found, options or {}))


def resolve_options(found: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the recipe with their values; a bad one is named with what is allowed."""
    from pydantic import ConfigDict, ValidationError, create_model

    parameters = found.options
    for key in options:
        if key not in parameters:
            raise _no_such_option(found.name, key, parameters)
    fields: dict[str, Any] = {
        key: (
            Any if p.annotation is inspect.Parameter.empty else p.annotation,
            ... if p.default is inspect.Parameter.empty else p.default,
        )
        for key, p in parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    model = create_model(
        "Options",
        __config__=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True),
        **fields,
    )
    try:
        return dict(model(**options))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = f"strategy.{key}: {first.get('input')!r}: {first['msg']}"
        raise BadInput(message) from error


def _parameters(build: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(build, eval_str=True).parameters.values())


def _chosen(build: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `build` takes."""
    return {name: options[name] for name in inspect.signature(build).parameters if name in options}


def _no_such_option(strategy: str, key: str, known: Collection[str]) -> BadInput:
    """One line with the option's new name, what replaces it, or the nearest known one."""
    new, replaced = (of.get(strategy, {}).get(key) for of in (RENAMED, REMOVED))
    if replaced:
        hint = f"; it was removed: {replaced}"
    else:
        place = new if new and "." in new else f"strategy.{new}"
        hint = f"; it is now {place}" if new else did_you_mean(key, ["name", *known])
    listed = ", ".join(known) or "none"
    return BadInput(f"strategy.{key}: {strategy} has no such option{hint} (options: {listed})")

"""The settings of a run that a checkpoint records, and which of them may change on a resume."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from latecomer.core.server import Server
from latecomer.errors import BadInput
from latecomer.loading import dotted
from latecomer.study.config import Config

Settings = Mapping[str, Any]  # key, as in "training.lr" -> value

# What `latecomer run --resume DIR --set` may change: bounds, evaluation, the learning rate, and
# what does not change results but for rounding.
CHANGEABLE = (
    "stop.updates",
    "stop.epochs",
    "stop.virtual_seconds",
    "evaluate.every",
    "evaluate.examples",
    "training.lr",
    "engine.device",
    "engine.memory_mb",
    "checkpoint.every",
    "checkpoint.seconds",
    "log.sinks",
)
MOST_LISTED = 8  # differences that an error lists
PART = "part "  # begins the names of the strategy's parts


def config_settings(config: Config) -> dict[str, Any]:
    """All keys in the config.toml of a run, but for those that single runs do not use."""
    tree = tomllib.loads(config.to_toml())
    return dotted({key: value for key, value in tree.items() if key not in ("compare", "study")})


def simulation_settings(config: Config, server: Server) -> Settings:
    """All keys of a resolved config, and the classes of the strategy's parts."""
    return config_settings(config) | _parts(server)


def deployment_settings(server: Server) -> Settings:
    """The seed, training settings and strategy of a server, under their keys in a config."""
    tree = {"seed": server.seed, "strategy": {"name": server.strategy.name}}
    return dotted({**tree, "training": asdict(server.spec)}) | _parts(server)


def differences(before: Settings, now: Settings) -> dict[str, str]:
    """Differing keys -> "key = value before, now value"."""
    keys = [*before, *(key for key in now if key not in before)]
    return {
        key: f"{key} = {_text(before.get(key))}, now {_text(now.get(key))}"
        for key in keys
        if before.get(key) != now.get(key)
    }


def listed(found: Mapping[str, str]) -> str:
    """Differences in one line; parts of the strategy only if no key of the config differs."""
    keys = [key for key in found if not key.startswith(PART)] or list(found)
    shown = [found[key] for key in keys[:MOST_LISTED]]
    more = len(keys) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def check_changeable(settings: Sequence[str]) -> None:
    """BadInput if one of these `a.b=value` names a key that is not in `CHANGEABLE`."""
    for setting, key in zip(settings, keys_of(settings), strict=True):
        if key not in CHANGEABLE:
            raise BadInput(
                f"--set {setting!r}: cannot change with --resume; what can is"
                f" {', '.join(CHANGEABLE)}"
            )


def keys_of(settings: Sequence[str]) -> list[str]:
    """The key of each `a.b=value`."""
    return [setting.partition("=")[0].strip() for setting in settings]


def _parts(server: Server) -> dict[str, str]:
    """The class of every part of the strategy by its path."""
    parts = server.parts.by_path.items()
    return {f"{PART}{path}": type(part).__name__ for path, part in parts}


def _text(value: Any) -> str:
    return "not set" if value is None else str(value)

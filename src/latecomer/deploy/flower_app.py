"""The settings of a Flower app, from its pyproject.toml and from `--set`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latecomer.deploy.node import Value
from latecomer.errors import BadInput, did_you_mean
from latecomer.study.config import toml_value


def app_config(app: Path) -> dict[str, Any]:
    """The settings in a Flower app's pyproject.toml; BadInput if the folder is no Flower app."""
    try:
        document = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        flower = document["tool"]["flwr"]["app"]
        flower["components"]["serverapp"], flower["components"]["clientapp"]
    except FileNotFoundError:
        raise BadInput(
            f"{app}: not a Flower app, there is no pyproject.toml "
            "(`latecomer deploy new DIR` makes one)"
        ) from None
    except (NotADirectoryError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{app}: not a Flower app: {error}") from None
    except (KeyError, TypeError):
        raise BadInput(
            f"{app}: not a Flower app: its pyproject.toml names no serverapp and clientapp "
            "in [tool.flwr.app.components]"
        ) from None
    return dict(flower.get("config", {}))


def parse_settings(settings: list[str], known: Mapping[str, Any]) -> dict[str, Value]:
    """The values of `key=value` texts, in TOML, for an app with the settings `known`.

    A value that is no TOML is a text.
    """
    found: dict[str, Value] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--set {text!r}: write it as key=value")
        if key not in known:
            raise BadInput(
                f"--set {key}: the app has no such setting{did_you_mean(key, known)} "
                f"(it has: {', '.join(known) or 'none'})"
            )
        parsed = toml_value(value)
        if not isinstance(parsed, str | int | float | bool):
            raise BadInput(f"--set {text!r}: must be a text, a number, true or false")
        found[key] = parsed
    return found

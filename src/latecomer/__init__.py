"""Latecomer: asynchronous federated learning that does not leave slow devices behind.

The public names below are imported when they are first used: `import latecomer` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "BadInput": "latecomer.errors",
    "RunFailed": "latecomer.errors",
    "Strategy": "latecomer.core.strategy",
    "Server": "latecomer.core.server",
    "recipe": "latecomer.strategies.recipe",
    "recipes": "latecomer.strategies.recipe",
    "build_strategy": "latecomer.strategies.recipe",
    "run": "latecomer.study.api",
    "compare": "latecomer.study.api",
    "load": "latecomer.study.results",
}

__all__ = [
    "BadInput",
    "RunFailed",
    "Server",
    "Strategy",
    "build_strategy",
    "compare",
    "load",
    "recipe",
    "recipes",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'latecomer' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if TYPE_CHECKING:
    from latecomer.core.server import Server
    from latecomer.core.strategy import Strategy
    from latecomer.errors import BadInput, RunFailed
    from latecomer.strategies.recipe import build_strategy, recipe, recipes
    from latecomer.study.api import compare, run
    from latecomer.study.results import load

"""Latecomer: asynchronous federated learning that does not leave slow devices behind.

The public names below are imported when they are first used: `import latecomer` stays fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    # experiments
    "run": "latecomer.study.api",
    "compare": "latecomer.study.api",
    "advise": "latecomer.study.api",
    "load": "latecomer.study.results",
    "Result": "latecomer.study.results",
    "Comparison": "latecomer.study.results",
    # strategies
    "Strategy": "latecomer.core.strategy",
    "build_strategy": "latecomer.strategies.recipe",
    "recipe": "latecomer.strategies.recipe",
    "recipes": "latecomer.strategies.recipe",
    # a server of your own, and the two sides of a Flower app
    "Server": "latecomer.core.server",
    "TrainSpec": "latecomer.core.messages",
    "FlatModel": "latecomer.device.flat",
    "flat_model": "latecomer.device.flat",
    "load_dataset": "latecomer.data.sources",
    "Networks": "latecomer.device.networks",
    "Bounds": "latecomer.engines.virtual",
    "GridTransport": "latecomer.engines.flower",
    "serve": "latecomer.study.deployed",
    "client_app": "latecomer.engines.flower_client",
    "AsyncStrategy": "latecomer.flower",
    # what can go wrong
    "BadInput": "latecomer.errors",
    "RunFailed": "latecomer.errors",
}

_RENAMED = {"GridPost": "GridTransport"}

__all__ = [
    "AsyncStrategy",
    "BadInput",
    "Bounds",
    "Comparison",
    "FlatModel",
    "GridTransport",
    "Networks",
    "Result",
    "RunFailed",
    "Server",
    "Strategy",
    "TrainSpec",
    "advise",
    "build_strategy",
    "client_app",
    "compare",
    "flat_model",
    "load",
    "load_dataset",
    "recipe",
    "recipes",
    "run",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise AttributeError(f"latecomer.{name} is now latecomer.{_RENAMED[name]}")
    if name not in _WHERE:
        raise AttributeError(f"module 'latecomer' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if TYPE_CHECKING:
    from latecomer.core.messages import TrainSpec
    from latecomer.core.server import Server
    from latecomer.core.strategy import Strategy
    from latecomer.data.sources import load_dataset
    from latecomer.device.flat import FlatModel, flat_model
    from latecomer.device.networks import Networks
    from latecomer.engines.flower import GridTransport
    from latecomer.engines.flower_client import client_app
    from latecomer.engines.virtual import Bounds
    from latecomer.errors import BadInput, RunFailed
    from latecomer.flower import AsyncStrategy
    from latecomer.strategies.recipe import build_strategy, recipe, recipes
    from latecomer.study.api import advise, compare, run
    from latecomer.study.deployed import serve
    from latecomer.study.results import Comparison, Result, load

"""Python objects that the caller of `latecomer.run` gives in place of names in the config."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from latecomer.device.objective import LossFunction
from latecomer.device.own_training import TrainFunction
from latecomer.errors import BadInput
from latecomer.study.metrics import Metric

GIVEN = "given:"  # in config.toml, before the name of an object that no import finds again


@dataclass(frozen=True)
class Given:
    """What was given in Python; None or empty where the config decides."""

    loss: LossFunction | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    data: object = None  # see latecomer.data.given
    model: nn.Module | Callable[..., nn.Module] | None = None
    train: TrainFunction | None = None
    client_app: Any = None  # a flwr.clientapp.ClientApp
    server_app: Any = None  # a flwr.serverapp.ServerApp, for its first message
    initial_arrays: Any = None  # of the client_app's model, in place of a server_app

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            kind = type(self.loss).__name__
            raise BadInput(f"loss: a {kind}; allowed are a name or a function (outputs, targets)")
        if self.model is not None and not callable(self.model):
            kind = type(self.model).__name__
            raise BadInput(f"model: a {kind}; allowed are a name, an nn.Module or a callable")
        if self.train is not None and not callable(self.train):
            kind = type(self.train).__name__
            raise BadInput(
                f"train: a {kind}; allowed are module:callable or a function"
                " (model, dataset, context)"
            )
        if not isinstance(self.metrics, Mapping):
            kind = type(self.metrics).__name__
            raise BadInput(f"metrics: a {kind}; allowed are names in a list, or {{name: function}}")

    @property
    def is_empty(self) -> bool:
        """Whether the config decides everything."""
        objects = {name: value for name, value in vars(self).items() if name != "metrics"}
        return not self.metrics and all(value is None for value in objects.values())


def how_to_resume(folder: Path, in_python: bool, command: str = "run") -> str:
    """The command, or with objects of Python the call, that continues a run or comparison."""
    if in_python:
        return f"`latecomer.{command}(resume={str(folder)!r}, ...)` and the same objects"
    return f"`latecomer {command} --resume {folder}`"


def reference(value: object, name: str = "", made: str = "") -> str:
    """`module:callable` if an import finds this object under it, else `given:` and its name.

    With a `name` the callable must have that name. `made` is the name of what the callable makes,
    to use after `given:`.
    """
    found = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", ""))
    importable = module is not None and getattr(module, "__name__", "") != "__main__"
    if importable and name in ("", found) and getattr(module, found, None) is value:
        return f"{value.__module__}:{found}"
    return f"{GIVEN}{name or made or found or type(value).__name__}"


def check_reference(key: str, text: str) -> None:
    """BadInput if the text names an object that was given in Python and is not here now."""
    if text.startswith(GIVEN):
        raise BadInput(
            f"{key} = {text!r}: it was given in Python and cannot be imported; give it again with"
            " latecomer.run, or put it into a module and name it as module:callable"
        )

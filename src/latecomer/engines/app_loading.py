"""A Flower app from its folder, and what its ServerApp would send first.

A ServerApp is run up to the first message of its strategy. From that come the initial arrays, the
configs of train and evaluate messages, the function for central evaluation and the rounds.
"""

import importlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from latecomer.device.seeding import all_seeded
from latecomer.engines.flower import only
from latecomer.engines.flower_private import allow_messages, of_earlier_kind
from latecomer.engines.virtual_grid import FIRST_NODE, SimulatedGrid
from latecomer.errors import BadInput, unknown
from latecomer.loading import at, dotted, first_line

RUN = 1  # number of the run in a Context
HINT = "name a function that returns the initial arrays: app.initial = 'module:callable'"

Value = bool | int | float | str
CentralEvaluation = Callable[[int, ArrayRecord], Mapping[str, Any] | None]


@dataclass(frozen=True)
class AppFolder:
    """The parts of an app that its pyproject.toml names; `config` is its flat run config."""

    name: str
    client_app: ClientApp
    server_app: ServerApp | None
    config: Mapping[str, Value]


@dataclass(frozen=True)
class FirstRequest:
    """What a server sends to its nodes: arrays, configs, and the names of records and metrics.

    `evaluate_fn` is the central evaluation of arrays after a round, `rounds` how many there are (0:
    not known).
    """

    arrays: Mapping[str, np.ndarray]
    train_config: Mapping[str, Any] = field(default_factory=dict)
    evaluate_config: Mapping[str, Any] = field(default_factory=dict)
    evaluate_fn: CentralEvaluation | None = None
    rounds: int = 0
    arrays_key: str = "arrays"
    config_key: str = "config"
    examples_key: str = "num-examples"


def load_app(folder: Path) -> AppFolder:
    """The ClientApp and ServerApp of the app in this folder; BadInput if there is none."""
    path = folder / "pyproject.toml"
    if not path.is_file():
        raise BadInput(
            f"{folder}: not a Flower app: it has no pyproject.toml; give the folder that has it"
        )
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{folder}: not a Flower app: {first_line(error)}") from error
    app = project.get("tool", {}).get("flwr", {}).get("app", {})
    components = app.get("components", {})
    if "clientapp" not in components:
        raise BadInput(
            f"{path}: not a Flower app: it names no clientapp in [tool.flwr.app.components]"
        )
    client = _component(folder, components["clientapp"], ClientApp)
    server = components.get("serverapp")
    return AppFolder(
        project.get("project", {}).get("name", folder.resolve().name),
        client,
        None if server is None else _component(folder, server, ServerApp),
        dotted(app.get("config", {})),
    )


def with_overrides(config: Mapping[str, Value], changes: Mapping[str, Any]) -> dict[str, Value]:
    """The run config with the user's changes; BadInput for a key that the app does not have."""
    flat = dotted(changes)
    for key in flat:
        if config and key not in config:
            raise unknown("app.config: key", key, list(config))
    return {**config, **flat}


def _component(folder: Path, reference: str, kind: type[Any]) -> Any:
    """Import `module:attribute` from the app's folder, which stays on the import path.

    Packages of the same name from another folder are removed from the imported ones first.
    """
    module, _, attribute = str(reference).partition(":")
    root, package = str(folder.resolve()), module.partition(".")[0]
    loaded = sys.modules.get(package)
    places = [getattr(loaded, "__file__", None) or "", *getattr(loaded, "__path__", ())]
    if loaded is not None and not any(place.startswith(root) for place in places):
        for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
            del sys.modules[name]
    if root in sys.path:
        sys.path.remove(root)
    sys.path.insert(0, root)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise BadInput(f"{folder}: cannot import '{reference}': {first_line(error)}") from error
    if not isinstance(found, kind):
        raise BadInput(
            f"{folder}: '{reference}' is a {type(found).__name__}, not a {kind.__name__}"
        )
    return found


# What a ServerApp sends first.


class _Captured(BaseException):
    """Ends the ServerApp; passes through `except Exception`."""

    def __init__(self, request: FirstRequest) -> None:
        super().__init__()
        self.request = request


def first_request(
    server_app: ServerApp, config: Mapping[str, Value], devices: int, seed: int
) -> FirstRequest:
    """Run the ServerApp until it starts a strategy or sends a message, with seeded generators."""
    if of_earlier_kind(server_app):
        raise BadInput(f"the ServerApp has no main function, only a server_fn; {HINT}")
    context = Context(RUN, 0, {}, RecordDict(), dict(config))
    try:
        with all_seeded(seed), allow_messages(), _starts_captured():
            server_app(_CapturingGrid(devices), context)
    except _Captured as captured:
        return captured.request
    except Exception as error:  # a user's app may raise anything
        raise BadInput(f"the ServerApp raised {first_line(error)}{at(error)}; {HINT}") from error
    raise BadInput(f"the ServerApp ended without sending a model; {HINT}")


@contextmanager
def _starts_captured() -> Iterator[None]:
    """Replace `start` of all of Flower's strategies by one that captures its arguments.

    `latecomer.flower.AsyncStrategy` is treated alike, if the app has imported it.
    """
    classes = [kind for kind in _with_subclasses(Strategy) if "start" in vars(kind)]
    if (ours := getattr(sys.modules.get("latecomer.flower"), "AsyncStrategy", None)) is not None:
        classes.append(ours)
    before = {kind: kind.start for kind in classes}

    def captured(original: Callable[..., Any]) -> Callable[..., NoReturn]:
        def start(*args: Any, **named: Any) -> NoReturn:
            given = inspect.signature(original).bind(*args, **named).arguments
            raise _Captured(_request(given["self"], given))

        return start

    for kind in classes:
        kind.start = captured(kind.start)
    try:
        yield
    finally:
        for kind, original in before.items():
            kind.start = original


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _with_subclasses(child)


def _request(strategy: object, given: Mapping[str, Any]) -> FirstRequest:
    return FirstRequest(
        arrays_of(given["initial_arrays"]),
        dict(given.get("train_config") or {}),
        dict(given.get("evaluate_config") or {}),
        given.get("evaluate_fn"),
        int(given.get("num_rounds", 3)),
        getattr(strategy, "arrayrecord_key", "arrays"),
        getattr(strategy, "configrecord_key", "config"),
        getattr(strategy, "weighted_by_key", "num-examples"),
    )


def arrays_of(arrays: Any) -> dict[str, np.ndarray]:
    """Arrays by name, of an ArrayRecord, a state_dict, a mapping or a list of arrays."""
    if isinstance(arrays, ArrayRecord):
        return {name: array.numpy() for name, array in arrays.items()}
    if isinstance(arrays, Mapping):
        return {str(name): _as_array(value) for name, value in arrays.items()}
    if isinstance(arrays, Sequence) and not isinstance(arrays, str | bytes):
        return {str(number): _as_array(value) for number, value in enumerate(arrays)}
    raise BadInput(
        f"the initial arrays are a {type(arrays).__name__}; allowed are an ArrayRecord, a"
        " state_dict, and a dict or list of arrays"
    )


def _as_array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


class _CapturingGrid(SimulatedGrid):
    """A grid that ends the ServerApp with its first messages."""

    def __init__(self, devices: int) -> None:
        self.devices = devices

    def get_node_ids(self) -> Iterable[int]:
        return [FIRST_NODE + device for device in range(self.devices)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            if (found := only(message.content, ArrayRecord)) is not None:
                keys = {type(record): key for key, record in message.content.items()}
                config = only(message.content, ConfigRecord) or {}
                raise _Captured(
                    FirstRequest(
                        arrays_of(found),
                        {key: value for key, value in config.items() if key != "server-round"},
                        arrays_key=keys[ArrayRecord],
                        config_key=keys.get(ConfigRecord, "config"),
                    )
                )
        raise RuntimeError("its first messages have no arrays")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.push_messages(messages)
        return []

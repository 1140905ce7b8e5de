"""A Flower app as the scenario of an experiment: devices, model and metrics come from the app."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from latecomer.core.arrays import ArrayLayout
from latecomer.core.messages import MAIN, Task, TrainSpec
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.data.federated_dataset import ClientData, Examples, FederatedDataset
from latecomer.device.array_model import ArrayModel
from latecomer.device.networks import Networks
from latecomer.errors import BadInput, RunFailed, unknown
from latecomer.loading import first_line, load_callable
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.parts.flower_rounds import FlowerRounds
from latecomer.study.config import OF_DATA, Config
from latecomer.study.given import GIVEN, Given, check_reference
from latecomer.study.metric_names import OTHER_COLUMNS, OTHER_PREFIXES
from latecomer.study.private import training_spec
from latecomer.study.resolution import absolute
from latecomer.study.scoring import Scoring

if TYPE_CHECKING:  # Flower is an extra
    from latecomer.engines.app_client import AppClient, AppRuntime
    from latecomer.engines.app_loading import AppFolder, FirstRequest

HIGHER_IS_BETTER = ("acc", "f1", "auc")  # parts of names of metrics
NO_EVALUATE = "No evaluate function registered"  # what Flower says


@dataclass(frozen=True)
class AppScoring(Scoring):
    """The metrics that an app reports, by the names of their columns.

    `names` are those of the central evaluation, or else of the devices' own, `local` is the
    devices' metric that is shown beside the main one; empty without any.
    """

    names: tuple[str, ...] = ()
    metric: str = ""
    local: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def main(self) -> str:
        return self.metric

    @property
    def lower_is_better(self) -> bool:
        return not rises(self.main)

    @property
    def stopping(self) -> str:
        return self.main


def rises(name: str) -> bool:
    """Whether larger values of the metric of this name are better."""
    return any(part in name.lower() for part in HIGHER_IS_BETTER)


def column_of(name: str) -> str:
    """The column of a metric; names that other columns have get a prefix."""
    taken = name in OTHER_COLUMNS or name.startswith(OTHER_PREFIXES)
    return f"app_{name}" if taken else name


class AppScenario:
    """Devices, model and metrics of a Flower app in virtual time.

    `config` is the config with what follows from the app. `federation` has as many placeholder
    examples per device as the app reports, for times and tables. The first task of every device is
    trained here, unless `app.examples` gives its number of examples.
    """

    def __init__(self, config: Config, given: Given, strategy: Strategy) -> None:
        _check_config(config)
        if (given.loss, given.data, given.model, given.train) != (None,) * 4 or given.metrics:
            raise BadInput("client_app: not with data, model, loss, metrics or train; it has them")
        folder = _folder(config, given)
        self.name, devices = folder.name, config.fleet.devices
        run_config = _run_config(folder, config)
        request = _first_request(config, given, folder, run_config)
        arrays = ArrayLayout.of(request.arrays)
        initial, self.unaveraged = arrays.split(request.arrays)
        self.model = ArrayModel(arrays, initial)
        self.networks = Networks(self.model)
        self.config = _completed(config, run_config, request, given)
        spec = strategy.prepare(training_spec(self.config))
        _check_strategy(Server(initial, strategy, spec), request.train_config)
        self.runtime = _runtime(folder, request, arrays, run_config, config)
        self.runtime.updates_per_version = updates_per_version(strategy, devices)
        clients = self._clients(config.app.examples, spec, initial)
        sizes = tuple(client.num_examples for client in clients)
        if not any(sizes):
            raise BadInput(f"app {self.name!r}: no device has any examples")
        app = self.config.app.model_copy(update={"examples": sizes})
        self.config = self.config.model_copy(update={"app": app})
        self.federation = _placeholders(sizes)
        self.clients: dict[int, AppClient] = {
            device: client for device, client in enumerate(clients) if client.num_examples
        }
        self.scoring = self._scoring(initial)

    def _clients(
        self, examples: Sequence[int], spec: TrainSpec, initial: Tensor
    ) -> "list[AppClient]":
        from latecomer.engines.app_client import AppClient

        devices = self.runtime.devices
        if examples and len(examples) != devices:
            raise BadInput(
                f"app.examples has {len(examples)} numbers for {devices} devices (fleet.devices);"
                " give one for each, or none"
            )
        if examples:
            return [AppClient(d, self.runtime, n) for d, n in enumerate(examples)]
        clients = [AppClient(device, self.runtime) for device in range(devices)]
        for client in clients:
            first = Task(-1, client.device, 0, MAIN, 0, spec, initial, unaveraged=self.unaveraged)
            client.ask_examples(first)
        return clients

    def _scoring(self, initial: Tensor) -> AppScoring:
        """The metrics that the app reports for the initial model."""
        local: tuple[str, ...] = ()
        client = next(iter(self.clients.values()))
        try:
            local = tuple(map(column_of, client.evaluate(initial, self.unaveraged, 0, {})[0]))
        except RunFailed as error:
            if NO_EVALUATE not in str(error):
                raise
        central = tuple(map(column_of, self.central(initial, self.unaveraged, 0)))
        names = central or local
        if not names:
            raise BadInput(
                f"app {self.name!r} has no metrics: its ClientApp has no evaluate function, and its"
                " ServerApp gives no evaluate_fn to its strategy"
            )
        metric = self.config.app.metric
        if metric and metric not in names:
            raise unknown("app.metric", metric, names)
        metric = metric or next(filter(rises, names), names[0])
        alike = [name for name in local if rises(name) == rises(metric)]
        beside = metric if metric in local else next(iter(alike), "")
        return AppScoring(self.model.objective, names=names, metric=metric, local=beside)

    def central(
        self, vector: Tensor, unaveraged: Mapping[str, Tensor], version: int
    ) -> dict[str, float]:
        """The metrics of the ServerApp's evaluate_fn; empty if it has none."""
        evaluate = self.runtime.request.evaluate_fn
        if evaluate is None:
            return {}
        try:
            arrays = self.runtime.model(vector, unaveraged)
            found = evaluate(self.runtime.round_of(version) - 1, arrays)
        except Exception as error:  # a user's function may raise anything
            raise RunFailed(f"the ServerApp's evaluate_fn raised {first_line(error)}") from error
        return {k: v for k, v in (found or {}).items() if not isinstance(v, list)}


def app_scenario(config: Config, given: Given, strategy: Strategy) -> AppScenario | None:
    """The app that the config or the caller gives; None without one."""
    if not config.app.path and given.client_app is None:
        return None
    return AppScenario(config, given, strategy)


def updates_per_version(strategy: Strategy, devices: int) -> int:
    """The updates that the strategy merges in a commit; for rounds those of all devices."""
    if strategy.has_epochs:
        return devices
    if isinstance(strategy.merge, CachedAggregation):
        return strategy.merge.updates_per_commit(devices)
    return int(getattr(strategy.merge, "size", 1))


def _check_config(config: Config) -> None:
    """BadInput for a setting that an app has no use for."""
    default = Config()
    for name in OF_DATA:
        section, usual = getattr(config, name), getattr(default, name)
        for key in type(section).model_fields:
            if (value := getattr(section, key)) != getattr(usual, key):
                raise BadInput(
                    f"{name}.{key} = {value!r}: a Flower app has its own data, model and training;"
                    " change its run config with app.config.KEY"
                )
    for key, used in {
        "fleet.late.classes": config.fleet.late.classes,
        "fleet.late.only": config.fleet.late.only,
        "stop.patience": config.stop.patience,
        "evaluate.examples": config.evaluate.examples,
    }.items():
        if used:
            raise BadInput(f"{key}: the data of a Flower app are not known to Latecomer")


def _check_strategy(server: Server, train_config: Mapping[str, Any]) -> None:
    """BadInput if the strategy needs more of devices than arrays.

    The default strategy does not compensate where it cannot.
    """
    from latecomer.engines.plain import NEAREST, needs_of

    strategy = server.strategy
    if isinstance(strategy.merge, FlowerRounds):
        raise BadInput(
            f"strategy {strategy.name!r}: a strategy of Flower's cannot run a Flower app in virtual"
            " time; name one of `latecomer list strategies`, e.g. fedavg"
        )
    if strategy.inverts and strategy.name == "latecomer":
        return
    if needs := needs_of(server, train_config):
        raise BadInput(
            f"strategy {strategy.name!r} needs {needs}, which a Flower app cannot give; the nearest"
            f" that does not is {NEAREST.get(strategy.name, 'fedavg')}"
        )


def _folder(config: Config, given: Given) -> "AppFolder":
    """The app in `app.path`, or the one given in Python."""
    try:
        from latecomer.engines.app_loading import AppFolder, load_app
    except ImportError as error:
        raise BadInput("a Flower app needs Flower: pip install 'latecomer[flower]'") from error
    if given.client_app is None:
        check_reference("app.path", config.app.path)
        return load_app(Path(config.app.path))
    if not callable(given.client_app):
        kind = type(given.client_app).__name__
        raise BadInput(f"client_app: a {kind}; allowed are a ClientApp, or the folder of an app")
    return AppFolder("client_app", given.client_app, given.server_app, {})


def _run_config(folder: "AppFolder", config: Config) -> dict[str, Any]:
    from latecomer.engines.app_loading import with_overrides

    return with_overrides(folder.config, config.app.config)


def _first_request(
    config: Config, given: Given, folder: "AppFolder", run_config: Mapping[str, Any]
) -> "FirstRequest":
    """What the ServerApp sends first; with arrays that the user gives these alone."""
    from latecomer.engines.app_loading import FirstRequest, arrays_of, first_request

    if given.initial_arrays is not None:
        return FirstRequest(arrays_of(given.initial_arrays))
    if config.app.initial:
        make = load_callable(config.app.initial, "app.initial")
        try:
            made = make()
        except Exception as error:  # a user's function may raise anything
            raise BadInput(
                f"app.initial = {config.app.initial!r}: calling it failed: {first_line(error)}"
            ) from error
        return FirstRequest(arrays_of(made))
    if folder.server_app is None:
        raise BadInput(
            "the app has no ServerApp, whose initial arrays could be taken; give them as"
            " app.initial = 'module:callable', or server_app= or initial_arrays= in Python"
        )
    return first_request(folder.server_app, run_config, config.fleet.devices, config.seed)


def _runtime(
    folder: "AppFolder",
    request: "FirstRequest",
    arrays: ArrayLayout,
    run_config: Mapping[str, Any],
    config: Config,
) -> "AppRuntime":
    from latecomer.engines.app_client import AppRuntime
    from latecomer.engines.flower_private import of_earlier_kind
    from latecomer.engines.plain import PlainFlowerCodec

    if of_earlier_kind(folder.client_app):
        raise BadInput(
            f"app {folder.name!r}: its ClientApp is made of a client_fn (NumPyClient); needed are"
            " functions of messages, @app.train() and @app.evaluate()"
        )
    codec = PlainFlowerCodec(arrays, request.train_config)
    node, devices = config.app.node, config.fleet.devices
    return AppRuntime(folder.client_app, request, codec, run_config, node, devices, config.seed)


def _completed(
    config: Config, run_config: Mapping[str, Any], request: "FirstRequest", given: Given
) -> Config:
    """The config with passes, bounds and the interval of evaluations that follow from the app."""
    from latecomer.engines.plain import EPOCHS, spec_of

    known, sent = spec_of(request.train_config), request.train_config.get(EPOCHS)
    if sent is not None and config.app.passes not in (0, sent):
        raise BadInput(
            f"app.passes = {config.app.passes}: the train config of the app has {EPOCHS} = {sent};"
            " leave app.passes out"
        )
    epochs = request.train_config.get(EPOCHS, run_config.get(EPOCHS))
    passes = config.app.passes or (epochs if isinstance(epochs, int) and epochs > 0 else 1)
    program = {"lr": known.lr, "batch_size": known.batch_size, "local_epochs": passes}
    path = f"{GIVEN}client_app" if given.client_app is not None else absolute(config.app.path)
    changes: dict[str, Any] = {
        "app": config.app.model_copy(update={"passes": passes, "path": path}),
        "training": config.training.model_copy(update=program),
    }
    stop, devices = config.stop, config.fleet.devices
    if request.rounds and not (stop.updates or stop.epochs or stop.virtual_seconds):
        changes["stop"] = stop.model_copy(update={"updates": request.rounds * devices})
    if not config.evaluate.every:
        changes["evaluate"] = config.evaluate.model_copy(update={"every": devices})
    return config.model_copy(update=changes)


def _placeholders(sizes: Sequence[int]) -> FederatedDataset:
    """A dataset of as many zeros as each device has examples."""

    def zeros(n: int) -> Examples:
        return Examples(torch.zeros(n, 0), torch.zeros(n))

    clients = tuple(ClientData(zeros(n), zeros(0), zeros(0)) for n in sizes)
    return FederatedDataset(clients, zeros(0), zeros(0), 0, (), (), (), 1)

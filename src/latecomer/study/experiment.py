"""From a config to everything a run needs: data on devices, model, fleet, server, engine."""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from math import ceil
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from latecomer.core.checks import Checks
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.data.drift import concatenate_streams
from latecomer.data.federated_dataset import Examples, FederatedDataset
from latecomer.device.accelerator import torch_device
from latecomer.device.checks import check_clipping
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.device.kernel import compiled_kernel
from latecomer.device.networks import Networks, build_networks
from latecomer.device.objective import Objective
from latecomer.device.own_training import TrainFunction
from latecomer.device.privacy import Privacy
from latecomer.device.training import average_loss
from latecomer.engines.attack import Attack, hostile_devices
from latecomer.engines.trainers import Batched, OneByOne, TaskClient, batch_size
from latecomer.engines.virtual import Bounds, ServerCosts, VirtualEngine
from latecomer.errors import BadInput
from latecomer.fleet.fleet import (
    OVERRIDABLE_FIELDS,
    Fleet,
    epoch_seconds,
    make_fleet,
    task_seconds,
    with_lateness,
)
from latecomer.fleet.late import lateness_from_epochs
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.submodel_widths import widths_by_speed
from latecomer.loading import first_line, load_callable
from latecomer.strategies.parts.flower_rounds import FlowerRounds, FlowerStrategy, from_flower
from latecomer.strategies.parts.personalisation import personalised
from latecomer.strategies.parts.submodel_levels import (
    SubmodelFitting,
    declared_levels,
    measured_levels,
)
from latecomer.strategies.recipe import Build, Recipe, find_recipe, resolve_options
from latecomer.study.app_scenario import AppScenario, app_scenario
from latecomer.study.config import Config, GammaDelay, StrategyConfig
from latecomer.study.given import Given, check_reference, reference
from latecomer.study.local_data import (
    LocalData,
    drift_in_seconds,
    late_devices,
    load_federated,
    read_data,
)
from latecomer.study.objectives import (
    check_objective,
    objective_notes,
    objective_of,
    scoring_of,
    tried,
    with_references,
)
from latecomer.study.private import privacy_of, training_spec
from latecomer.study.resolution import Resolution, resolved_levels
from latecomer.study.schedule import make_schedule
from latecomer.study.scoring import Scoring
from latecomer.study.setup_notes import setup_notes

# The share of devices that must have answered before any sub-model is chosen by speed.
MEASURED_BY = 0.8


class Experiment:
    """One scenario, ready to run. Built from the config alone, so a resume builds the same.

    A `strategy` built from parts, a strategy of Flower's, or a function that makes either, replaces
    the one that the config names. The same object serves any number of experiments. `given` has
    the Python objects that replace other names in the config.
    """

    def __init__(
        self,
        config: Config,
        strategy: Strategy | FlowerStrategy | Build | None = None,
        given: Given | None = None,
    ) -> None:
        given = given or Given()
        self.in_python = strategy is not None or not given.is_empty
        self.recipe = _recipe(config, strategy)
        if strategy is not None:
            name = reference(strategy, made=self.recipe.name)
            config = config.model_copy(update={"strategy": StrategyConfig(name=name)})
        options = resolve_options(self.recipe, config.strategy.options)
        made = self.recipe.make(options)
        self.app: AppScenario | None = app_scenario(config, given, made)
        levels = resolved_levels(config.submodels, self.recipe)
        if self.app is None:
            config = self._build(config.model_copy(update={"submodels": levels}), given)
        else:
            config = self.app.config.model_copy(update={"submodels": levels})
            self.federation: FederatedDataset = self.app.federation
            self.networks: Networks = self.app.networks
            self.scoring: Scoring = self.app.scoring
            self.train: TrainFunction | None = None
            self.data_fingerprint = ""
        self.model: FlatModel = self.networks.whole
        self.spec = training_spec(config)
        self.fleet = self._fleet(config)
        strategy = self._with_submodels(made, config)
        prior = config.personalise.prior and self.scoring.objective.classifies
        self.strategy = personalised(strategy, prior, config.personalise.finetune_epochs)
        check_objective(self.scoring.objective, self.strategy, self.spec)
        self.resolution = Resolution(
            config,
            self.recipe,
            self.strategy,
            self.spec,
            self.networks,
            self.fleet,
            self._sizes,
        )
        self.epoch_seconds = self.resolution.epoch_seconds
        self.config = self.resolution.resolved(options)
        self.kernel_choice = "{} ({})".format(*self.resolution.kernel)
        drift = drift_in_seconds(self.config.data.drift, self.epoch_seconds)
        official = self.config.data.test == "official"
        self.data = LocalData(self.federation, drift, official, self.config.seed)
        self._check_privacy()
        self._check_attack()
        if self.strategy.prepare(self.spec).clip:
            private = self.config.privacy.epsilon > 0
            setting = "privacy.where = 'step'" if private else "training.clip"
            check_clipping(self.model.traits, setting)
        self._check_own_training()
        self._check_flower_strategy()
        self._check_that_time_passes()
        if self.config.engine.kernel == "compiled":
            for model in self.networks.models:
                found = compiled_kernel(model)
                model.kernel = None if isinstance(found, str) else found

    def _build(self, config: Config, given: Given) -> Config:
        """Load the data, build the networks and the metrics; returns the completed config."""
        objective_config = with_references(config.objective, given)
        config = config.model_copy(update={"objective": objective_config})
        config = _with_objects(config, given)
        dataset, config, self.data_fingerprint = read_data(config, given)
        self.federation = load_federated(config, dataset)
        tokens = dataset.extreme_tokens
        del dataset  # its rows in memory are copied to the devices
        objective = objective_of(config.objective, self.federation, given)
        self.networks = _networks(config, self.federation, objective, given.model)
        _check_tokens(self.networks.whole, tokens, config.model.name)
        self.train = _train_function(config, given)
        device = torch_device(config.engine.device)
        for model in self.networks.models:
            model.to(device)
            if self.train is not None:
                model.opaque = "devices run a training function of your own"
            elif ":" in config.training.optimizer:
                model.opaque = "devices use an optimiser of your own"
        late, targets = config.fleet.late.classes, self.federation.test.y
        scoring = scoring_of(config.objective, objective, given, late, targets)
        self.scoring = tried(self.networks, [c.train for c in self.federation.clients], scoring)
        return config

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the data, the fleet and the settings for the user."""
        settings = setup_notes(self.config, self.recipe, self.strategy, self.spec)
        train = (client.train for client in self.federation.clients)
        objective = objective_notes(self.model, self.strategy, self.config.personalise.prior, train)
        return (*self.federation.notes, *self.fleet.notes, *settings, *objective)

    @property
    def source_name(self) -> str:
        """The name of the data, or of the app that has them."""
        return self.config.data.source if self.app is None else self.app.name

    @property
    def model_name(self) -> str:
        """The name of the network, or of the kind of app that has it."""
        return self.config.model.name if self.app is None else "ClientApp"

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the classes or labels that have an F1 each; empty for other targets."""
        objective = self.scoring.objective
        if objective.kind not in ("classes", "multi-label"):
            return ()
        return self.federation.class_names or tuple(map(str, range(objective.outputs)))

    # Devices.

    @property
    def _sizes(self) -> list[int]:
        return [len(client.train.y) for client in self.federation.clients]

    def privacy(self, examples: int) -> Privacy | None:
        """The privacy mechanism of a device with that many examples; None without privacy."""
        return privacy_of(self.config.privacy, self.spec, examples)

    @cached_property
    def clients(self) -> Mapping[int, TaskClient]:
        """The clients of all devices with training examples; one for pooled data."""
        if self.app is not None:
            return self.app.clients
        pooled, over_time = self.recipe.pooled, [each.train for each in self.data.streams]
        parts = (
            [self.federation.pooled()]
            if pooled
            else [client.train for client in self.federation.clients]
        )
        if over_time and pooled:
            over_time = [concatenate_streams(over_time)]
        tree = {} if self.train is None else self.config.model_dump(mode="json")
        return {
            device: Client(
                device,
                self.networks,
                part.y if part.stored else part.x,  # stored inputs are read for a task
                part.y,
                self.config.seed,
                # Where data change, by the examples at the start: fewer need more noise.
                self.privacy(len(over_time[device](0.0).y if over_time else part.y)),
                over_time[device] if over_time else (_constant(part) if part.stored else None),
                train=self.train,
                config=tree,
            )
            for device, part in enumerate(parts)
            if len(part.y)
        }

    @cached_property
    def hostile(self) -> frozenset[int]:
        """The hostile devices; none if all data are pooled on one machine."""
        settings = self.config.attack
        if settings.kind == "none" or self.recipe.pooled:
            return frozenset()
        return hostile_devices(self.clients, settings.devices, self.config.seed)

    def _attack(self) -> Attack:
        """The attack of one run, at its beginning."""
        settings = self.config.attack
        return Attack(
            settings.kind, self.hostile, settings.strength, settings.begin, self.config.seed
        )

    def _fleet(self, config: Config) -> Fleet:
        """The fleet of the config, with its late devices."""
        settings = config.fleet
        overrides = {name: getattr(settings, name) for name in OVERRIDABLE_FIELDS}
        devices = len(self.federation.clients)
        fleet = make_fleet(settings.profile, devices, settings.path, config.seed, overrides)
        late = settings.late
        delay = late.delay.gamma if isinstance(late.delay, GammaDelay) else late.delay
        if not delay:
            return fleet
        chosen = late_devices(config, self.federation)
        if self.recipe.punctual:
            delay = 0.0  # still listed as late, for the metrics of these devices
        passes = [self.spec.epoch_examples(n) * self.spec.local_epochs for n in self._sizes]
        epoch = epoch_seconds(fleet.devices, passes, 4 * self.model.layout.size)
        how = lateness_from_epochs(late.kind, delay, epoch, isinstance(late.delay, GammaDelay))
        return with_lateness(fleet, chosen, how)

    def _one_machine(self) -> Fleet:
        """A machine for pooled data: as fast as the median device, without a network."""
        speeds = np.median(
            [[d.seconds_per_example, d.seconds_per_task] for d in self.fleet.devices], axis=0
        )
        return Fleet((DeviceProfile(float(speeds[0]), float(speeds[1])),), seed=self.config.seed)

    # Sub-models.

    @cached_property
    def levels(self) -> list[float]:
        """The width that each device declares, by its nominal time for the whole model."""
        return self._levels(self.config)

    def _levels(self, config: Config) -> list[float]:
        settings = config.submodels
        passes = [self.spec.epoch_examples(n) * self.spec.local_epochs for n in self._sizes]
        costs = task_seconds(self.fleet.devices, passes, 4 * self.model.layout.size)
        # PrivaAsyncFed's 3 : 3 : 2 : 2 for four widths, equal shares for others.
        usual = (3.0, 3.0, 2.0, 2.0) if len(settings.widths) == 4 else (1.0,) * len(settings.widths)
        try:
            return widths_by_speed(costs, settings.widths, settings.shares or usual)
        except BadInput as error:
            raise BadInput(f"submodels.shares: {error}") from error

    def _with_submodels(self, strategy: Strategy, config: Config) -> Strategy:
        """The strategy with the sub-models that the config gives to devices."""
        settings, networks = config.submodels, self.networks
        if settings.level == "declared":
            widths = self._levels(config)
            return declared_levels(strategy, [networks.submodels[width] for width in widths])
        if settings.level == "measured":
            by_width = {width: networks.submodels[width] for width in settings.widths}
            # The first answers are of the fastest devices: too few would be a poor measure.
            needed = ceil(MEASURED_BY * sum(n > 0 for n in self._sizes))
            fitting = SubmodelFitting(by_width, networks.works, settings.slack, needed)
            return measured_levels(strategy, fitting)
        return strategy

    # The run.

    def server(self) -> Server:
        """A new server at the initial model; every call gives an independent one."""
        return Server(
            self.model.init(self.config.seed),
            self.strategy,
            self.spec,
            # As in a deployment.
            Checks(self.config.server.norm_ratio, stop=self.config.server.most_refused == "stop"),
            self.config.seed,
            networks=self.networks,
            schedule=make_schedule(self.config.training),
            unaveraged=None if self.app is None else self.app.unaveraged,
        )

    def engine(self, server: Server) -> VirtualEngine:
        """The virtual engine around a server of this experiment."""
        settings = self.config.server
        costs = ServerCosts(
            settings.merge_seconds, settings.evaluate_seconds, settings.compensate_seconds
        )
        attack = self._attack()
        trainer = self._trainer(attack.clients(self.clients))
        if isinstance(server.strategy.merge, FlowerRounds):
            from latecomer.engines.virtual_grid import FlowerRoundsEngine

            engine: VirtualEngine = FlowerRoundsEngine(
                server,
                self.fleet,
                trainer,
                self.clients,
                self.model.layout,
                self._local_scores,
                costs,
            )
        else:
            fleet = self._one_machine() if self.recipe.pooled else self.fleet
            engine = VirtualEngine(server, fleet, trainer, self.clients, costs)
        engine.attack = attack
        return engine

    def _trainer(self, clients: Mapping[int, TaskClient]) -> OneByOne:
        if self.config.engine.kernel != "batched":
            return OneByOne(clients)
        examples = max(client.num_examples for client in clients.values())
        size = batch_size(self.model, self.spec, examples, self.config.engine.memory_mb)
        return Batched(cast(Mapping[int, Client], clients), size)

    def _local_scores(self, device: int, params: Tensor) -> tuple[dict[str, float], int] | None:
        """Scores of a model on the device's test part, and its number of examples."""
        part = self.data.test_of(device)
        if not len(part.y):
            return None
        with torch.no_grad():
            found = self.scoring.scores([(self.model.logits(params, part.x), part.y)])
        names = ("loss", "accuracy") if self.scoring.objective.classifies else self.scoring.columns
        known = {name: value for name in names if (value := found[name]) is not None}
        return {**known, "loss": average_loss(self.model, params, part.x, part.y)}, len(part.y)

    def bounds(self, strategy: Strategy) -> Bounds:
        """Where the run ends; a strategy without epochs ends after as many nominal ones."""
        stop = self.config.stop
        if strategy.has_epochs or not stop.epochs:
            return Bounds(stop.updates, stop.epochs, stop.virtual_seconds)
        horizon = stop.epochs * self.epoch_seconds
        if stop.virtual_seconds:
            horizon = min(horizon, stop.virtual_seconds)
        return Bounds(stop.updates, 0, horizon)

    # Checks of settings, before any file is written.

    def _check_privacy(self) -> None:
        if not self.config.privacy.epsilon:
            if budget := self.config.privacy.budget:
                raise BadInput(
                    f"privacy.budget = {budget:g}: privacy is switched off by privacy.epsilon = 0;"
                    " give an epsilon above 0, or no budget"
                )
            return
        if needs := self.strategy.needs:
            raise BadInput(
                f"strategy {self.recipe.name!r} needs devices to report {needs}, which no"
                " privacy ledger covers; set privacy.epsilon = 0 or choose another strategy"
            )
        if self.recipe.pooled:
            raise BadInput(
                f"strategy {self.recipe.name!r} pools all data on one machine:"
                " local privacy has no meaning there; set privacy.epsilon = 0"
            )
        self.privacy(max(self._sizes))

    def _check_attack(self) -> None:
        objective, kind = self.scoring.objective, self.config.attack.kind
        if kind == "label-flip" and not objective.classifies:
            raise BadInput(
                f"attack.kind = {kind!r}: needs class labels, and the targets here are of kind"
                f" {objective.kind!r}; allowed are sign-flip, scale, noise, free-rider and"
                " claim-examples"
            )

    def _check_own_training(self) -> None:
        """BadInput if a setting needs the built-in training and the user brings another."""
        if self.train is None:
            return
        spec, config = self.strategy.prepare(self.spec), self.config
        try:
            inspect.signature(self.train).bind("model", "dataset", "context")
        except TypeError as error:
            raise BadInput(
                f"training.function = {config.training.function!r}: {error}; it is called with"
                " model, dataset and context"
            ) from None
        except ValueError:
            pass  # a built-in without a signature
        refused = {
            "privacy.epsilon": (config.privacy.epsilon, "it cannot promise differential privacy"),
            "submodels.level": (config.submodels.level != "none", "it trains the whole model"),
            "training.clip": (spec.clip, "it clips gradients itself"),
            "personalise.finetune_epochs": (
                config.personalise.finetune_epochs,
                "fine-tuning would use the built-in training",
            ),
            "last-layer training": (spec.last_layer_only, "it trains the whole model"),
        }
        for setting, (used, reason) in refused.items():
            if used:
                raise BadInput(
                    f"training.function = {config.training.function!r}: not with {setting},"
                    f" because {reason}"
                )

    def _check_flower_strategy(self) -> None:
        """BadInput if a Flower strategy would wait for more devices than the fleet has."""
        merge = self.strategy.merge
        if not isinstance(merge, FlowerRounds):
            return
        if (level := self.config.submodels.level) != "none":
            raise BadInput(
                f"submodels.level = {level!r}: a strategy of Flower's has one model for all devices"
                "; set it to 'none'"
            )
        devices = sum(n > 0 for n in self._sizes)
        for option in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
            if (wanted := getattr(merge.flower_strategy, option, 0)) > devices:
                raise BadInput(
                    f"strategy.{option} = {wanted}: the fleet has {devices} devices with data, so"
                    f" {type(merge.flower_strategy).__name__} would wait for ever"
                )

    def _check_that_time_passes(self) -> None:
        stop, pooled = self.config.stop, self.recipe.pooled
        takes = self._one_machine().devices[0].compute_seconds(1) if pooled else self.epoch_seconds
        if not (takes or stop.updates or (stop.epochs and pooled)):
            raise BadInput(
                "fleet: a task takes no time at all, so stop.virtual_seconds is never reached;"
                " give fleet.seconds_per_task or stop.updates"
            )


def _constant(part: Examples) -> Callable[[float], Examples]:
    return lambda time: part


def _recipe(config: Config, strategy: Strategy | FlowerStrategy | Build | None) -> Recipe:
    """The recipe that the config names, or one for the strategy or factory given."""
    if strategy is None:
        check_reference("strategy.name", config.strategy.name)
        return find_recipe(config.strategy.name)
    if isinstance(strategy, FlowerStrategy):
        strategy = from_flower(strategy)
    if isinstance(strategy, Strategy):
        made = strategy
        return Recipe(made.name, "built from parts", "", lambda: made)
    if not callable(strategy):
        kind = type(strategy).__name__
        raise BadInput(f"strategy: a {kind}; allowed are a name, a Strategy or a function")
    made = Recipe("custom", "made by a function", "", strategy).make({})
    return Recipe(made.name, "made by a function", "", lambda: made)


def _input_dtype(federation: FederatedDataset) -> torch.dtype:
    """float32, or int64 for tokens; one example is read."""
    first = next((client.train for client in federation.clients if len(client.train.y)), None)
    return torch.float32 if first is None else first.take(torch.tensor([0])).x.dtype


def _with_objects(config: Config, given: Given) -> Config:
    """The config with references to the objects given in Python, for config.toml."""
    changes: dict[str, Any] = {}
    if given.model is not None:
        name = {"name": reference(given.model)}
        changes["model"] = config.model.model_copy(update=name)
    else:
        check_reference("model.name", config.model.name)
    if given.train is not None:
        function = {"function": reference(given.train)}
        changes["training"] = config.training.model_copy(update=function)
    else:
        check_reference("training.function", config.training.function)
    return config.model_copy(update=changes)


def _check_tokens(model: FlatModel, rows: NDArray[np.int64] | None, name: str) -> None:
    """BadInput if the network fails on the examples with the smallest and the largest token."""
    if rows is None:
        return
    try:
        model.logits(model.init(0), torch.from_numpy(rows))
    except IndexError as error:
        least, most = int(rows.min()), int(rows.max())
        raise BadInput(
            f"model.name = {name!r}: forward fails with {first_line(error)}; tokens of the data go"
            f" from {least} to {most}, allowed are 0 to one less than the size of the nn.Embedding,"
            f" here {most + 1} or more"
        ) from error


def _train_function(config: Config, given: Given) -> TrainFunction | None:
    """The user's local training, given in Python or named by the config; None: the built-in one."""
    if given.train is not None or not config.training.function:
        return given.train
    return load_callable(config.training.function, "training.function")


def _networks(
    config: Config,
    federation: FederatedDataset,
    objective: Objective,
    given: nn.Module | Callable[..., nn.Module] | None = None,
) -> Networks:
    """The network in all widths that devices may train."""
    widths = config.submodels.widths if config.submodels.level != "none" else (1.0,)
    if not widths or not all(0 < w <= 1 for w in widths) or len({*widths}) < len(widths):
        raise BadInput(
            f"submodels.widths = {list(widths)}: allowed are one or more, each above 0 and"
            " at most 1, and none twice"
        )
    shape, outputs = federation.input_shape, federation.num_outputs
    try:
        return build_networks(
            config.model.name if given is None else given,
            shape,
            outputs,
            config.model.hidden,
            widths,
            objective,
            config.model.buffers,
            config.seed,
            _input_dtype(federation),
        )
    except BadInput as error:
        if "at width " not in str(error):  # it is the model that is wrong
            raise
        hint = "submodels.level = 'none' gives every device the whole model"
        raise BadInput(f"submodels.widths: {error}; {hint}") from error

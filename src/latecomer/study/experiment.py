"""From a config to everything a run needs: data on devices, model, fleet, server, engine."""

from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from latecomer.core.checks import Checks
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.data.dataset import Dataset
from latecomer.data.drift import ClientDataStreams, Drift, client_data_streams, concatenate_streams
from latecomer.data.exclusive_classes import ExclusiveClasses
from latecomer.data.federated_dataset import Examples, FederatedDataset, federate
from latecomer.data.options import SourceOptions
from latecomer.data.rare_classes import drop_rare_classes
from latecomer.data.sources import load
from latecomer.device.batching import reason_not_to_batch
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.device.networks import Networks, build_networks
from latecomer.device.privacy import Privacy
from latecomer.device.training import average_loss
from latecomer.engines.trainers import Batched, OneByOne, Trainer, batch_size
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
from latecomer.fleet.late import choose_late, lateness_from_epochs
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.submodel_widths import widths_by_speed
from latecomer.strategies.parts.flower_rounds import FlowerRounds, FlowerStrategy, from_flower
from latecomer.strategies.parts.submodel_levels import (
    SubmodelFitting,
    declared_levels,
    measured_levels,
)
from latecomer.strategies.recipe import Recipe, find_recipe, resolve_options
from latecomer.study.config import (
    Config,
    DataConfig,
    DriftConfig,
    GammaDelay,
    StopConfig,
    StrategyConfig,
    SubmodelsConfig,
)
from latecomer.study.private import privacy_of, training_spec

# Below this many local steps in a run, compiling the kernel takes longer than it saves.
WORTH_COMPILING = 30_000
# The share of devices that must have been heard before any is called slow.
MEASURED_BY = 0.8

TEST_SHARE = 0.2  # of a device's examples, behind its training and validation parts


class Experiment:
    """One scenario, ready to run. Built from the config alone, so a resume builds the same.

    A `strategy` built from parts, or an object of Flower's, takes the place of the one the config
    names.
    """

    def __init__(self, config: Config, strategy: Strategy | FlowerStrategy | None = None) -> None:
        if isinstance(strategy, FlowerStrategy):
            strategy = from_flower(strategy)
        if strategy is not None:
            config = config.model_copy(update={"strategy": StrategyConfig(name=strategy.name)})
        self.recipe: Recipe = (
            find_recipe(config.strategy.name)
            if strategy is None
            else Recipe(strategy.name, "built from parts", "", lambda: strategy)
        )
        options = resolve_options(self.recipe, config.strategy.options)
        dataset = load(config.data.source, config.data.path, source_options(config.data))
        dataset = drop_rare_classes(dataset, config.data.min_examples)
        _check_late_classes(config, dataset)
        self.federation: FederatedDataset = federate(
            dataset,
            partition=config.data.partition,
            devices=config.fleet.devices,
            alpha=config.data.alpha,
            test=config.data.test,
            scale=config.data.scale,
            augment=config.data.augment,
            split=(1 - TEST_SHARE - config.data.validation, config.data.validation, TEST_SHARE),
            per_device=config.data.per_device,
            window=config.data.window,
            replicas=config.data.replicas,
            second_domain=second_domain(config.data.drift),
            exclusive=_exclusive_classes(config, dataset),
            seed=config.seed,
        )
        config = self._with_level(config)
        self.networks: Networks = self._networks(config)
        self.model: FlatModel = self.networks.whole
        self.spec = training_spec(config)
        self.fleet = self._fleet(config)
        self.config = self._resolved(config, options)
        self._check_privacy()
        self._check_director()
        self.drift = drift_in_seconds(self.config.data.drift, self.epoch_seconds)
        self._check_that_time_passes()
        self._choose_kernel()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how this was set up."""
        return (*self.federation.notes, *self.fleet.notes, *self._program_notes())

    def _program_notes(self) -> Iterable[str]:
        if self.drift is not None and self.config.data.test == "official":
            yield "data.drift: the official test rows belong to no device and do not change"
        if self._strategy().inverts and self.spec.optimizer == "adam":
            yield (
                f"{self.recipe.name} with training.optimizer = 'adam': inversion through Adam is"
                " inaccurate; the switch ends it where it does harm, sgd is the better choice"
            )
        late = self.config.fleet.late
        if late.only and not late.delay:
            yield "fleet.late.only with a fleet.late.delay of 0: nobody is late, but for being slow"
        private = self.config.privacy.epsilon > 0
        if self.recipe.private and not private:
            yield f"{self.recipe.name} without privacy: privacy.epsilon is 0, nothing is noised"
        if private and self.config.data.scale == "global":
            yield (
                "data.scale = 'global': the means and deviations that features are scaled by are on"
                " no privacy ledger; use 'none' where that matters (docs/privacy.md)"
            )
        if private and self._strategy().prepare(self.spec).report_loss:
            yield (
                f"{self.recipe.name}: the loss that devices would report is not covered by their"
                " privacy ledger and is not sent; the norm of their updates stands for it"
            )

        if private and self._strategy().prepare(self.spec).feedback:
            yield (
                f"{self.recipe.name}: the feedback that devices would give on their model is not"
                " covered by their privacy ledger and is not sent; clusters form by distance alone"
            )

    def _strategy(self) -> Strategy:
        strategy = self.recipe.make(self.config.strategy.options)
        settings, networks = self.config.submodels, self.networks
        if settings.level == "declared":
            return declared_levels(strategy, [networks.submodels[w] for w in self.levels])
        if settings.level == "measured":
            widths = {width: networks.submodels[width] for width in settings.widths}
            # The first to be heard are the fastest: too few of them would make a poor measure.
            devices = sum(len(client.train.y) > 0 for client in self.federation.clients)
            heard = ceil(MEASURED_BY * devices)
            return measured_levels(
                strategy, SubmodelFitting(widths, networks.works, settings.slack, heard)
            )
        return strategy

    @cached_property
    def levels(self) -> list[float]:
        """The width that each device declares, by its nominal time for the whole model."""
        settings = self.config.submodels
        costs = task_seconds(self.fleet.devices, self._passes(), 4 * self.model.layout.size)
        try:
            return widths_by_speed(
                costs, settings.widths, settings.shares or _usual_shares(settings)
            )
        except BadInput as error:
            raise BadInput(f"submodels.shares: {error}") from error

    def privacy(self, examples: int) -> Privacy | None:
        """How a device with so many examples protects them; None if it does not."""
        return privacy_of(self.config.privacy, self.spec, examples)

    @cached_property
    def epoch_seconds(self) -> float:
        """One nominal epoch of the fleet in virtual seconds, the unit of `fleet.late.delay`."""
        return self._epoch_seconds(self.fleet)

    @cached_property
    def clients(self) -> dict[int, Client]:
        """The devices that have something to train on."""
        pooled, over_time = self.recipe.pooled, [each.train for each in self.streams]
        parts = (
            [self.federation.pooled()]
            if pooled
            else [client.train for client in self.federation.clients]
        )
        if over_time and pooled:
            over_time = [concatenate_streams(over_time)]
        return {
            device: Client(
                device,
                self.networks,
                part.x,
                part.y,
                self.config.seed,
                # Where data change, by what it has first: fewer examples need more noise.
                self.privacy(len(over_time[device](0.0).y if over_time else part.y)),
                over_time[device] if over_time else None,
            )
            for device, part in enumerate(parts)
            if len(part.y)
        }

    @cached_property
    def streams(self) -> tuple[ClientDataStreams, ...]:
        """The devices' data over time; empty if they do not change."""
        if self.drift is None:
            return ()
        return client_data_streams(self.federation, self.drift, self.config.seed)

    def server(self) -> Server:
        return Server(
            self.model.init(self.config.seed),
            self._strategy(),
            self.spec,
            # Simulated devices neither lie about how much they have nor flood the server.
            Checks(self.config.server.norm_ratio, examples_ratio=0.0, votes=0),
            self.config.seed,
            networks=self.networks,
        )

    def engine(self, server: Server) -> VirtualEngine:
        own = self.config.server
        costs = ServerCosts(own.merge_seconds, own.evaluate_seconds, own.compensate_seconds)
        if isinstance(server.strategy.merge, FlowerRounds):
            from latecomer.engines.virtual_grid import FlowerRoundsEngine

            return FlowerRoundsEngine(
                server,
                self.fleet,
                self._trainer(),
                self.clients,
                self.model.layout,
                self._fit,
                costs,
            )
        fleet = self._one_machine() if self.recipe.pooled else self.fleet
        return VirtualEngine(server, fleet, self._trainer(), self.clients, costs)

    def _fit(self, device: int, params: Tensor) -> tuple[dict[str, float], int] | None:
        """How a model does on the device's own held-back data, and on how many examples."""
        part = self.test_of(device)
        if not len(part.y):
            return None
        with torch.no_grad():
            right = self.model.logits(params, part.x).argmax(1) == part.y
        loss = average_loss(self.model, params, part.x, part.y)
        return {"loss": loss, "accuracy": right.float().mean().item()}, len(part.y)

    def bounds(self, strategy: Strategy) -> Bounds:
        """Where the run ends. A strategy without epochs stops after as many nominal ones."""
        stop = self.config.stop
        if strategy.has_epochs or not stop.epochs:
            return Bounds(stop.updates, stop.epochs, stop.virtual_seconds)
        horizon = stop.epochs * self.epoch_seconds
        if stop.virtual_seconds:
            horizon = min(horizon, stop.virtual_seconds)
        return Bounds(stop.updates, 0, horizon)

    def test_of(self, device: int, time: float = 0.0) -> Examples:
        """The device's own held-back data at that time."""
        if self.streams:
            return self.streams[device].test(time)
        return self.federation.clients[device].test

    def train_of(self, device: int, time: float = 0.0) -> Examples:
        """What the device trains on at that time."""
        if self.streams:
            return self.streams[device].train(time)
        return self.federation.clients[device].train

    def central_test(self, time: float = 0.0) -> Examples:
        """What the server measures on: the devices' present data, or fixed official rows."""
        if not self.streams or self.config.data.test == "official":
            return self.federation.test
        sharing = self.federation.held_out or range(len(self.streams))
        return concatenate_streams([self.streams[device].test for device in sharing])(time)

    def validation(self, time: float = 0.0) -> Examples:
        """What early stopping looks at: the devices' validation parts."""
        if not self.streams:
            return self.federation.validation
        return concatenate_streams([each.validation for each in self.streams])(time)

    def _fleet(self, config: Config) -> Fleet:
        settings = config.fleet
        overrides = {name: getattr(settings, name) for name in OVERRIDABLE_FIELDS}
        devices = len(self.federation.clients)
        fleet = make_fleet(settings.profile, devices, settings.path, config.seed, overrides)
        late = settings.late
        delay = late.delay.gamma if isinstance(late.delay, GammaDelay) else late.delay
        if not delay:
            return fleet
        counts = self.federation.class_counts().numpy()
        chosen = self.federation.holders or choose_late(
            counts, late.classes, late.devices, config.seed
        )
        if self.recipe.punctual:
            delay = 0.0  # still listed as late: the metrics of these devices are wanted
        how = lateness_from_epochs(
            late.kind, delay, self._epoch_seconds(fleet), isinstance(late.delay, GammaDelay)
        )
        return with_lateness(fleet, chosen, how)

    def _epoch_seconds(self, fleet: Fleet) -> float:
        size = 4 * self.model.layout.size
        return epoch_seconds(fleet.devices, self._passes(), size)

    def _passes(self) -> list[int]:
        """How many examples each device passes through in a task."""
        sizes = [len(client.train.y) for client in self.federation.clients]
        return [n * self.spec.local_epochs for n in sizes]

    def _with_level(self, config: Config) -> Config:
        """The config with the level of sub-models that the strategy is meant for filled in."""
        settings: SubmodelsConfig = config.submodels
        if settings.level != "auto" and not self.recipe.pooled:
            return config
        # Where everybody's data are in one place there are no weak devices.
        level = "declared" if self.recipe.widths else "none"
        return config.model_copy(update={"submodels": settings.model_copy(update={"level": level})})

    def _networks(self, config: Config) -> Networks:
        """The network in all widths that devices may carry."""
        widths = config.submodels.widths if config.submodels.level != "none" else (1.0,)
        if not widths or not all(0 < w <= 1 for w in widths) or len({*widths}) < len(widths):
            raise BadInput(
                f"submodels.widths = {list(widths)}: allowed are one or more, each above 0 and"
                " at most 1, and none twice"
            )
        shape, classes = self.federation.input_shape, self.federation.num_classes
        try:
            return build_networks(config.model.name, shape, classes, config.model.hidden, widths)
        except BadInput as error:
            if "at width " not in str(error):  # it is the model that is wrong
                raise
            hint = "submodels.level = 'none' gives every device the whole model"
            raise BadInput(f"submodels.widths: {error}; {hint}") from error

    def _resolved(self, config: Config, options: dict[str, object]) -> Config:
        """The config with every default that depends on other values filled in."""
        devices = len(self.federation.clients)
        stop, every = config.stop, config.evaluate.every
        if not (stop.updates or stop.epochs or stop.virtual_seconds):
            stop = stop.model_copy(update={"updates": 50 * devices})
        if not every and self.recipe.pooled:
            every = 1  # one update passes over everybody's data
        elif not every:
            every = max(1, stop.updates // 50 if stop.updates else devices)
        privacy = config.privacy
        if privacy.epsilon and privacy.mode == "whole-run" and not privacy.tasks:
            privacy = privacy.model_copy(update={"tasks": max(1, ceil(self._planned_epochs(stop)))})
        # Whole paths: a run may be resumed from another folder.
        fleet = {"devices": devices, "path": _whole(config.fleet.path)}
        return config.model_copy(
            update={
                "data": config.data.model_copy(
                    update={"path": _whole(config.data.path), "drift": self._dated(config, stop)}
                ),
                "fleet": config.fleet.model_copy(update=fleet),
                "strategy": StrategyConfig(name=config.strategy.name, **options),
                "stop": stop,
                "privacy": privacy,
                "evaluate": config.evaluate.model_copy(update={"every": every}),
            }
        )

    def _planned_epochs(self, stop: StopConfig) -> float:
        """How many tasks the average device does until the nearest bound."""
        devices = sum(len(client.train.y) > 0 for client in self.federation.clients)
        bounds = [stop.updates / max(1, devices), float(stop.epochs)]
        if self.epoch_seconds:
            bounds.append(stop.virtual_seconds / self.epoch_seconds)
        return min((bound for bound in bounds if bound), default=1.0)

    def _check_privacy(self) -> None:
        if not self.config.privacy.epsilon:
            if budget := self.config.privacy.budget:
                raise BadInput(
                    f"privacy.budget = {budget:g}: privacy is switched off by privacy.epsilon = 0;"
                    " give an epsilon above 0, or no budget"
                )
            return
        if needs := self._strategy().needs:
            raise BadInput(
                f"strategy {self.recipe.name!r} needs to hear from devices {needs}, which no"
                " privacy ledger covers; set privacy.epsilon = 0 or choose another strategy"
            )
        if self.recipe.pooled:
            raise BadInput(
                f"strategy {self.recipe.name!r} gathers everybody's data in one place:"
                " local privacy has no meaning there; set privacy.epsilon = 0"
            )
        # What cannot be is refused here, before anything is written.
        self.privacy(max(len(client.train.y) for client in self.federation.clients))

    def _check_director(self) -> None:
        """A strategy of Flower's waits for nodes that do not exist for ever: better said now."""
        merge = self._strategy().merge
        if not isinstance(merge, FlowerRounds):
            return
        if (level := self.config.submodels.level) != "none":
            raise BadInput(
                f"submodels.level = {level!r}: a strategy of Flower's has one model for all devices"
                "; set it to 'none'"
            )
        devices = sum(len(client.train.y) > 0 for client in self.federation.clients)
        for option in ("min_available_nodes", "min_train_nodes", "min_evaluate_nodes"):
            if (wanted := getattr(merge.flower_strategy, option, 0)) > devices:
                raise BadInput(
                    f"strategy.{option} = {wanted}: the fleet has {devices} devices with data, so"
                    f" {type(merge.flower_strategy).__name__} would wait for ever"
                )

    def _dated(self, config: Config, stop: StopConfig) -> DriftConfig:
        """Begin and length filled in, from how many epochs the run is likely to take."""
        drift = config.data.drift
        if drift.kind == "none":
            return drift
        epochs = self._planned_epochs(stop)
        begin = drift.begin or (epochs / 2 if drift.kind == "shift" else 0.0)
        over = drift.over or max(epochs - begin, 0.0)
        path = _whole(drift.path)
        return drift.model_copy(update={"begin": begin, "over": over, "path": path})

    def _check_that_time_passes(self) -> None:
        stop, pooled = self.config.stop, self.recipe.pooled
        takes = self._one_machine().devices[0].compute_seconds(1) if pooled else self.epoch_seconds
        if not (takes or stop.updates or (stop.epochs and pooled)):
            raise BadInput(
                "fleet: a task takes no time at all, so stop.virtual_seconds is never reached;"
                " give fleet.seconds_per_task or stop.updates"
            )

    def _choose_kernel(self) -> None:
        """Fill in how local training is computed; never by timing, so that a run is repeatable."""
        kernel, why = self.config.engine.kernel, "as configured"
        compiled = self._compiled_kernel()
        if kernel == "compiled" and isinstance(compiled, str):
            raise BadInput(f"engine.kernel = 'compiled': {compiled}")
        if kernel == "batched" and self.vmap_trouble:
            raise BadInput(f"engine.kernel = 'batched': {self.vmap_trouble}")
        if kernel == "auto":
            if not isinstance(compiled, str) and self._planned_steps() >= WORTH_COMPILING:
                kernel, why = "compiled", "a plain network and much to do"
            elif len(self.clients) == 1:
                kernel, why = "plain", "a single device"
            elif self.config.privacy.epsilon:
                kernel, why = "plain", "devices with a ledger do their tasks one by one"
            elif self._strategy().prepare(self.spec).remembers:
                kernel, why = "plain", "devices with a memory do their tasks one by one"
            elif self.vmap_trouble:
                kernel, why = "plain", self.vmap_trouble
            else:
                kernel, why = "batched", compiled if isinstance(compiled, str) else "little to do"
        if kernel == "compiled":
            for model in self.networks.models:
                found = compiled_kernel(model)
                model.kernel = None if isinstance(found, str) else found
        self.kernel_choice = f"{kernel} ({why})"
        chosen = self.config.engine.model_copy(update={"kernel": kernel})
        self.config = self.config.model_copy(update={"engine": chosen})

    def _compiled_kernel(self) -> CompiledKernel | str:
        """The kernel, if it covers what this strategy has its devices do; else the reason."""
        if self.config.privacy.epsilon:
            return "noise in every step needs the plain one"
        found = compiled_kernel(self.model)
        spec = self._strategy().prepare(self.spec)
        if isinstance(found, CompiledKernel) and not found.covers(spec):
            return "it does not cover this training program (see docs/speed.md)"
        return found

    @cached_property
    def vmap_trouble(self) -> str | None:
        """Why several models cannot be computed at once; None if they can."""
        return reason_not_to_batch(self.model)

    def _planned_steps(self) -> float:
        """Local training steps until the nearest bound, roughly."""
        stop = self.config.stop
        devices = len(self.clients)
        sizes = [client.num_examples for client in self.clients.values()]
        steps = self.spec.local_epochs * float(
            np.mean([-(-n // self.spec.batch_size) for n in sizes])
        )
        bounds = [float(stop.updates), float(stop.epochs * devices)]
        if stop.virtual_seconds and self.epoch_seconds:
            bounds.append(self._tasks_in(stop.virtual_seconds))
        return steps * min((bound for bound in bounds if bound), default=0.0)

    def _tasks_in(self, seconds: float) -> float:
        """How many tasks are done in so much virtual time: where nobody waits, most by the fast."""
        if self._strategy().has_epochs:
            return seconds / self.epoch_seconds * len(self.clients)
        each = task_seconds(self.fleet.devices, self._passes(), 4 * self.model.layout.size)
        return sum(seconds / each[device] for device in self.clients if each[device])

    def _trainer(self) -> Trainer:
        if self.config.engine.kernel != "batched":
            return OneByOne(self.clients)
        examples = max(client.num_examples for client in self.clients.values())
        size = batch_size(self.model, self.spec, examples, self.config.engine.memory_mb)
        return Batched(self.clients, size)

    def _one_machine(self) -> Fleet:
        """Where pooled data are trained on: as fast as the fleet's median device, no network."""
        speeds = np.median(
            [[d.seconds_per_example, d.seconds_per_task] for d in self.fleet.devices], axis=0
        )
        return Fleet((DeviceProfile(float(speeds[0]), float(speeds[1])),), seed=self.config.seed)


def source_options(data: DataConfig) -> SourceOptions:
    """Those keys of `[data]` that are for the source alone."""
    return SourceOptions(**{f.name: getattr(data, f.name) for f in fields(SourceOptions)})


def second_domain(drift: DriftConfig) -> Dataset | None:
    """The data that take the place of the first, if they come from a source."""
    if drift.kind == "replace" and drift.second == "source":
        if not drift.source:
            raise BadInput("data.drift.second = 'source': name it with data.drift.source")
        return load(drift.source, drift.path)
    if drift.source or drift.path:
        raise BadInput(
            "data.drift.source and data.drift.path are for kind = 'replace' and second = 'source'"
        )
    return None


def drift_in_seconds(drift: DriftConfig, epoch_seconds: float) -> Drift | None:
    """The drift with its epochs as virtual seconds; None if there is none."""
    if drift.kind == "none":
        return None
    if not epoch_seconds:
        raise BadInput("data.drift: epochs take no time on this fleet; give its tasks a cost")
    begin, over = drift.begin * epoch_seconds, drift.over * epoch_seconds
    return Drift(
        kind=drift.kind,
        begin=begin,
        end=begin + over,
        first=drift.first,
        per_second=drift.rate / epoch_seconds,
        repeat=drift.repeat,
        second=drift.second,
        share=drift.share,
    )


def _usual_shares(settings: SubmodelsConfig) -> tuple[float, ...]:
    """PrivaAsyncFed's 3 : 3 : 2 : 2 for a table of four widths, equal parts for others."""
    return (3.0, 3.0, 2.0, 2.0) if len(settings.widths) == 4 else (1.0,) * len(settings.widths)


def _whole(path: str) -> str:
    return str(Path(path).resolve()) if path and Path(path).exists() else path


def _check_late_classes(config: Config, dataset: Dataset) -> None:
    for label in config.fleet.late.classes:
        if not 0 <= label < dataset.num_classes:
            raise BadInput(
                f"fleet.late.classes: {label} is no class of {config.data.source}"
                f" (0 to {dataset.num_classes - 1})"
            )


def _exclusive_classes(config: Config, dataset: Dataset) -> ExclusiveClasses | None:
    late = config.fleet.late
    if not late.only:
        return None
    if not late.classes:
        raise BadInput("fleet.late.only = true: needs fleet.late.classes, e.g. [3]; it is empty")
    if not late.devices:
        raise BadInput("fleet.late.only = true: needs fleet.late.devices of 1 or more; it is 0")
    if len({*late.classes}) == dataset.num_classes:
        raise BadInput("fleet.late.only = true: fleet.late.classes must leave others a class")
    if config.data.drift.renames:
        raise BadInput("fleet.late.only = true: data.drift would give others the class by renaming")
    return ExclusiveClasses(
        late.classes,
        lambda counts: choose_late(counts, late.classes, late.devices, config.seed),
    )

"""Completing a config: every value that depends on others is filled in, once, before a run."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

import numpy as np
from torch.nn.modules.conv import _ConvNd

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import Strategy
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.device.networks import Networks
from latecomer.device.training import reason_not_to_batch
from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet, epoch_seconds, task_seconds
from latecomer.strategies.recipe import Recipe
from latecomer.study.config import (
    Config,
    DriftConfig,
    PrivacyConfig,
    StopConfig,
    StrategyConfig,
    SubmodelsConfig,
    TrainingConfig,
)

# Below this many local steps in a run, compiling the kernel takes longer than it saves.
WORTH_COMPILING = 30_000
ALWAYS_BATCHED = 10_000  # parameters of a network up to which a batch is faster


def resolved_levels(settings: SubmodelsConfig, recipe: Recipe) -> SubmodelsConfig:
    """The sub-model settings, with "auto" replaced by the level of the strategy's recipe."""
    if settings.level != "auto" and not recipe.pooled:
        return settings
    # Data pooled on one machine: there are no weak devices.
    return settings.model_copy(update={"level": "declared" if recipe.widths else "none"})


@dataclass
class Resolution:
    """Fills in the values of a config that depend on data, fleet, model or strategy.

    `sizes` are the training examples of every device.
    """

    config: Config
    recipe: Recipe
    strategy: Strategy
    spec: TrainSpec
    networks: Networks
    fleet: Fleet
    sizes: list[int]

    def resolved(self, options: dict[str, object]) -> Config:
        """The complete config, with the strategy's `options`."""
        config, stop = self.config, self._stop
        # Absolute paths: a run may be resumed from another folder.
        fleet = {"devices": len(self.sizes), "path": absolute(config.fleet.path)}
        data = {"path": absolute(config.data.path), "drift": self._drift(stop)}
        return config.model_copy(
            update={
                "data": config.data.model_copy(update=data),
                "fleet": config.fleet.model_copy(update=fleet),
                "strategy": StrategyConfig(name=config.strategy.name, **options),
                "stop": stop,
                "privacy": self._privacy(stop),
                "evaluate": config.evaluate.model_copy(update={"every": self._every(stop)}),
                "training": self._training(stop),
                "engine": config.engine.model_copy(update=self._engine),
            }
        )

    @property
    def _engine(self) -> dict[str, str]:
        return {"kernel": self.kernel[0], "device": str(self.networks.whole.device)}

    @cached_property
    def epoch_seconds(self) -> float:
        """One nominal epoch of the fleet in virtual seconds."""
        return epoch_seconds(self.fleet.devices, self._passes, self._bytes)

    @cached_property
    def task_seconds(self) -> list[float]:
        """Virtual seconds of a task of the whole model, by device."""
        return task_seconds(self.fleet.devices, self._passes, self._bytes)

    @property
    def _passes(self) -> list[int]:
        """Training examples that each device processes in a task."""
        return [self.spec.epoch_examples(n) * self.spec.local_epochs for n in self.sizes]

    @property
    def _bytes(self) -> int:
        return 4 * self.networks.whole.layout.size

    @property
    def _trained_sizes(self) -> list[int]:
        """Training examples of every client that trains: the devices with data, or one machine."""
        sizes = [n for n in self.sizes if n]
        return [sum(sizes)] if self.recipe.pooled else sizes

    @cached_property
    def _stop(self) -> StopConfig:
        stop = self.config.stop
        if stop.updates or stop.epochs or stop.virtual_seconds:
            return stop
        return stop.model_copy(update={"updates": 50 * len(self.sizes)})

    def _every(self, stop: StopConfig) -> int:
        every = self.config.evaluate.every
        if every:
            return every
        if self.recipe.pooled:
            return 1  # one update is a pass over all data
        return max(1, stop.updates // 50 if stop.updates else len(self.sizes))

    def _privacy(self, stop: StopConfig) -> PrivacyConfig:
        privacy = self.config.privacy
        if not privacy.epsilon or privacy.mode != "whole-run" or privacy.tasks:
            return privacy
        return privacy.model_copy(update={"tasks": max(1, ceil(self._planned_epochs(stop)))})

    def _training(self, stop: StopConfig) -> TrainingConfig:
        """With the versions that a schedule of the learning rate spans, if they are not given."""
        training = self.config.training
        if training.schedule not in ("step", "cosine") or training.schedule_versions:
            return training
        versions = self._planned_versions(stop) / (3 if training.schedule == "step" else 1)
        return training.model_copy(update={"schedule_versions": max(1, round(versions))})

    def _planned_versions(self, stop: StopConfig) -> float:
        """Commits until the nearest bound: one per epoch, or one per update or full buffer."""
        epochs = self._planned_epochs(stop)
        if self.strategy.has_epochs:
            return epochs
        updates = epochs * sum(n > 0 for n in self.sizes)
        return updates / max(1, getattr(self.strategy.merge, "size", 1))

    def _drift(self, stop: StopConfig) -> DriftConfig:
        """Begin and length in nominal epochs, from the expected length of the run."""
        drift = self.config.data.drift
        if drift.kind == "none":
            return drift
        epochs = self._planned_epochs(stop)
        begin = drift.begin or (epochs / 2 if drift.kind == "shift" else 0.0)
        over = drift.over or max(epochs - begin, 0.0)
        path = absolute(drift.path)
        return drift.model_copy(update={"begin": begin, "over": over, "path": path})

    def _planned_epochs(self, stop: StopConfig) -> float:
        """Tasks of the average device until the nearest bound."""
        devices = sum(n > 0 for n in self.sizes)
        bounds = [stop.updates / max(1, devices), float(stop.epochs)]
        if self.epoch_seconds:
            bounds.append(stop.virtual_seconds / self.epoch_seconds)
        return min((bound for bound in bounds if bound), default=1.0)

    @cached_property
    def batching_problem(self) -> str | None:
        """Why several models cannot be computed at once; None if they can."""
        return self.networks.whole.opaque or reason_not_to_batch(self.networks.whole)

    @cached_property
    def kernel(self) -> tuple[str, str]:
        """How local training is computed, and why; never by timing, so that runs are repeatable."""
        kernel = self.config.engine.kernel
        compiled = self._compiled_kernel()
        if kernel == "compiled" and isinstance(compiled, str):
            raise BadInput(f"engine.kernel = 'compiled': {compiled}")
        if kernel == "batched" and self.batching_problem:
            raise BadInput(f"engine.kernel = 'batched': {self.batching_problem}")
        if kernel != "auto":
            return kernel, "as configured"
        if not isinstance(compiled, str) and self._planned_steps() >= WORTH_COMPILING:
            return "compiled", "a plain network and many steps"
        if len(self._trained_sizes) == 1:
            return "plain", "a single device"
        if opaque := self.networks.whole.opaque:
            return "plain", opaque
        if self.config.training.schedule != "constant" and not self.strategy.has_epochs:
            return "plain", "the learning rate changes with every version"
        if self.config.privacy.epsilon:
            return "plain", "devices with a privacy ledger train one task at a time"
        if self.strategy.prepare(self.spec).needs_memory:
            return "plain", "devices that keep state between tasks train one task at a time"
        if slower := self._reason_batching_is_slower():
            return "plain", slower
        if self.batching_problem:
            return "plain", self.batching_problem
        return "batched", compiled if isinstance(compiled, str) else "few steps"

    def _reason_batching_is_slower(self) -> str | None:
        """Why a batch takes longer than its tasks one by one; None if it does not.

        By measurement (docs/speed.md): the time of a batched step is 0.4 + parameters / 90,000 of
        that of plain ones, and every task of a batch takes as many steps as the longest.
        """
        whole, sizes = self.networks.whole, self._trained_sizes
        if any(isinstance(part, _ConvNd) for part in whole.module.modules()):
            return "convolutions with different weights are slower in one batch"
        if whole.layout.size <= ALWAYS_BATCHED:
            return None
        steps = [self.spec.epoch_steps(n) for n in sizes]
        time = (0.4 + whole.layout.size / 90_000) * max(steps) / float(np.mean(steps))
        return "a batch of networks of this size takes longer than one by one" if time > 1 else None

    def _compiled_kernel(self) -> CompiledKernel | str:
        """The kernel, if it covers the strategy's training program; else the reason."""
        if self.config.privacy.epsilon:
            return "training with privacy needs the plain kernel"
        if self.networks.whole.opaque:
            return self.networks.whole.opaque
        if self.networks.whole.device.type != "cpu":
            return "the compiled kernel runs on the CPU only (engine.device)"
        found = compiled_kernel(self.networks.whole)
        if isinstance(found, CompiledKernel) and not found.covers(self.strategy.prepare(self.spec)):
            return "it does not cover this training program (see docs/speed.md)"
        return found

    def _planned_steps(self) -> float:
        """Local training steps until the nearest bound, roughly."""
        stop, sizes = self._stop, self._trained_sizes
        steps = self.spec.local_epochs * float(np.mean([self.spec.epoch_steps(n) for n in sizes]))
        bounds = [float(stop.updates), float(stop.epochs * len(sizes))]
        if stop.virtual_seconds and self.epoch_seconds:
            bounds.append(self.tasks_in(stop.virtual_seconds))
        return steps * min((bound for bound in bounds if bound), default=0.0)

    def tasks_in(self, seconds: float) -> float:
        """Tasks in that much virtual time: by epochs, or of all devices working all the time."""
        if self.strategy.has_epochs:
            return seconds / self.epoch_seconds * len(self._trained_sizes)
        working = [self.task_seconds[0]] if self.recipe.pooled else self.task_seconds
        each = [t for t, n in zip(working, self.sizes, strict=False) if t and n]
        return sum(seconds / t for t in each)


def absolute(path: str) -> str:
    """The path from the root, if it exists."""
    return str(Path(path).resolve()) if path and Path(path).exists() else path

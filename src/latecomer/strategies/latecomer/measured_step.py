"""The server step, from how much the mean update changes when the model has moved.

    L = sqrt( sum |mean of (delta - delta')|^2 / sum |mean of (base - base')|^2 )
    s = - sum <mean of (delta - delta'), mean of (base - base')> / sum |mean of (base - base')|^2

The means are over the devices of a commit that have reported before, weighted by the contributions'
weights; ' marks the base and delta of a device's previous update. The sums are over commits, with
exponential forgetting over about one fleet pass. All are computed on `COORDINATES` random
coordinates, and the variance of known privacy noise is subtracted from the numerator of L^2.

L estimates the Lipschitz constant of the map from the model to the mean update; mini-batch noise
raises it. s is minus the slope of that map along the movement of the model (Barzilai and Borwein
1988), on which such noise has little influence. L near 1: base + delta hardly depends on the base
(large learning rates), so a gain far above 1 would overshoot that point. L near 0: delta hardly
depends on the base (small rates), so a large gain is safe. s above 1: a mean update overshoots
already, so the gain must be below 1.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.strategy import Stateful
from latecomer.core.submodel import name_of

COORDINATES = 1024  # random coordinates of bases and deltas on which L and s are measured
SAFE = 1.4  # largest gain * L, without delay
FIRST_GAIN = 2.0
MIN_GAIN = 0.25  # so that one hostile device cannot stop the model
MAX_GROWTH = 10.0  # factor per fleet pass
COORDINATE_STREAM = 0x57E9


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """Base and delta of a device's last update, on the measured coordinates of its sub-model."""

    submodel: str
    base: Tensor
    delta: Tensor
    noise_std: float


@dataclass(slots=True)
class MeanChange:
    """Sums of weight * (delta - delta') and weight * (base - base') over devices that report again.

    `noise` is the noise variance of `change` per coordinate, `weight` the sum of the weights.
    """

    change: Tensor
    move: Tensor
    noise: float = 0.0
    weight: float = 0.0


class MeasuredStep(Stateful):
    """Computes the gain: by how many mean updates the model moves per fleet pass."""

    kept = ("gain", "delay", "_visits", "_changes", "_moves", "_slopes")

    def __init__(self) -> None:
        self.gain = FIRST_GAIN
        self.delay = 0.0  # mean staleness, in fleet passes
        self._visits: dict[int, Visit] = {}  # by device
        # The sums of L^2 and s, with forgetting over a fleet pass.
        self._changes, self._moves, self._slopes = 0.0, 0.0, 0.0
        self._coordinates: dict[int, Tensor] = {}  # by number of parameters

    def advance(
        self, clipped: Sequence[tuple[Contribution, float]], members: int, seed: int
    ) -> float:
        """The gain for a commit with these updates, each with the factor that clips its norm.

            gain <- max(least, min(1.4 / L, 10^p * gain, 1 / p)), initially 2
            least = 1 if s <= 1, else max(0.25, 1 / s)

        p is the number of fleet passes per commit, so 1 / p is one mean update per commit. Before a
        device has reported twice the gain stays 2. Returns gain / sqrt(1 + delay), with delay the
        running mean of the staleness in fleet passes.
        """
        passes = len(clipped) / members
        keep = max(0.5, 1.0 - passes)
        staleness = sum(contribution.staleness for contribution, _ in clipped) / members
        self.delay = keep * self.delay + (1.0 - keep) * staleness
        self._measure(clipped, keep, seed)
        least = 1.0
        if self._moves > 0:
            lipschitz = math.sqrt(self._changes / self._moves)
            safe = SAFE / lipschitz if lipschitz > 0 else math.inf
            self.gain = min(safe, self.gain * MAX_GROWTH**passes, 1.0 / passes)
            if self._slopes > self._moves:
                least = max(MIN_GAIN, self._moves / self._slopes)
        self.gain = max(least, self.gain)
        return self.gain / math.sqrt(1.0 + self.delay)

    def _measure(
        self, clipped: Iterable[tuple[Contribution, float]], keep: float, seed: int
    ) -> None:
        """Multiply the sums by `keep` and add the terms of a commit, if it has any."""
        means: dict[str, MeanChange] = {}  # by sub-model
        for contribution, factor in clipped:
            before, visit = self._visit(contribution, factor, seed)
            if before is None or before.submodel != visit.submodel:
                continue
            mean = means.setdefault(
                visit.submodel,
                MeanChange(torch.zeros_like(visit.delta), torch.zeros_like(visit.base)),
            )
            weight = contribution.weight
            mean.change += weight * (visit.delta - before.delta)
            mean.move += weight * (visit.base - before.base)
            mean.noise += weight**2 * (visit.noise_std**2 + before.noise_std**2)
            mean.weight += weight
        total = sum(mean.weight for mean in means.values())
        if not total:
            return
        self._changes, self._moves = keep * self._changes, keep * self._moves
        self._slopes *= keep
        for mean in means.values():
            scale = 1.0 / (mean.weight * total)  # the mean squared, times its share of the weight
            noise = mean.noise * mean.change.numel()
            self._changes += scale * max(0.0, mean.change.dot(mean.change).item() - noise)
            self._moves += scale * mean.move.dot(mean.move).item()
            self._slopes -= scale * mean.change.dot(mean.move).item()

    def _visit(
        self, contribution: Contribution, factor: float, seed: int
    ) -> tuple[Visit | None, Visit]:
        """The device's previous visit (None: its first) and this one, which is stored instead."""
        index = self._measured(contribution.delta.numel(), seed)
        visit = Visit(
            name_of(contribution.task.submodel),
            contribution.base[index].double(),
            contribution.delta[index].double() * factor,
            contribution.update.noise_std * factor,
        )
        before = self._visits.get(contribution.task.device)
        self._visits[contribution.task.device] = visit
        return before, visit

    def _measured(self, parameters: int, seed: int) -> Tensor:
        if parameters not in self._coordinates:
            rng = np.random.default_rng([seed, COORDINATE_STREAM, parameters])
            count = min(COORDINATES, parameters)
            chosen = np.sort(rng.choice(parameters, count, replace=False))
            self._coordinates[parameters] = torch.from_numpy(chosen)
        return self._coordinates[parameters]

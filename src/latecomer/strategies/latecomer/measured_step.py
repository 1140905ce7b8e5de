"""The server step, from how much a device's update changes when the model has moved.

    L = sqrt( sum |delta - delta'|^2 / sum |base - base'|^2 )

over devices that report again; ' is their previous visit. L estimates the Lipschitz constant of the
map from the model to the mean update. Near 1, an update leads to a nearly fixed point (large
learning rates): more than one mean update per fleet pass would overshoot. Near 0, updates are
directions (small rates), and many mean updates per fleet pass are safe.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.strategy import Stateful
from latecomer.core.submodel import name_of

COORDINATES = 1024  # random coordinates of bases and deltas on which L is measured
SAFE = 2.0  # largest gain * L
FIRST_GAIN = 2.0
MAX_GROWTH = 3.0  # factor per fleet pass
COORDINATE_STREAM = 0x57E9


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """Base and delta of a device's last update, on the measured coordinates of its sub-model."""

    submodel: str
    base: Tensor
    delta: Tensor
    noise_std: float


class MeasuredStep(Stateful):
    """Computes `gain`: how many mean updates per fleet pass the model may move."""

    kept = ("gain", "_visits", "_changes", "_moves")

    def __init__(self) -> None:
        self.gain = FIRST_GAIN
        self._visits: dict[int, Visit] = {}  # by device
        self._changes, self._moves = 0.0, 0.0  # the two sums of L^2, with forgetting
        self._coordinates: dict[int, Tensor] = {}  # by number of parameters

    def record(self, contribution: Contribution, factor: float, members: int, seed: int) -> None:
        """Add an update, multiplied by its clipping `factor`; sums are forgotten over a pass."""
        index = self._measured(contribution.delta.numel(), seed)
        visit = Visit(
            name_of(contribution.task.submodel),
            contribution.base[index].double(),
            contribution.delta[index].double() * factor,
            contribution.update.noise_std * factor,
        )
        before = self._visits.get(contribution.task.device)
        self._visits[contribution.task.device] = visit
        if before is None or before.submodel != visit.submodel:
            return
        move = (visit.base - before.base).square().sum().item()
        noise = (visit.noise_std**2 + before.noise_std**2) * len(index)
        change = max(0.0, (visit.delta - before.delta).square().sum().item() - noise)
        keep = 1.0 - 1.0 / max(2, members)
        self._changes = keep * self._changes + change
        self._moves = keep * self._moves + move

    def advance(self, passes: float) -> float:
        """The gain for a commit after `passes` of a fleet pass: 2 / L, at least 1.

        It grows at most threefold per fleet pass, and no further than one mean update per commit.
        """
        if self._moves > 0:
            lipschitz = math.sqrt(self._changes / self._moves)
            safe = SAFE / lipschitz if lipschitz > 0 else math.inf
            self.gain = min(safe, self.gain * MAX_GROWTH**passes, 1.0 / passes)
        self.gain = max(1.0, self.gain)
        return self.gain

    def _measured(self, parameters: int, seed: int) -> Tensor:
        if parameters not in self._coordinates:
            rng = np.random.default_rng([seed, COORDINATE_STREAM, parameters])
            count = min(COORDINATES, parameters)
            chosen = np.sort(rng.choice(parameters, count, replace=False))
            self._coordinates[parameters] = torch.from_numpy(chosen)
        return self._coordinates[parameters]

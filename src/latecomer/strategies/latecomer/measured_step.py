"""The server step, from how much the devices' updates change when the model has moved.

For every device that has reported at least twice: its change is delta - delta', its movement
base - base' (' marks its previous update). Over these devices, with the weights of their updates,

    L = |mean change| / |mean movement|

estimates the Lipschitz constant of the map from the model to the mean update. L near 1: base +
delta hardly depends on the base (large learning rates), so a step far above one mean update would
overshoot that point. L near 0: delta hardly depends on the base (small rates), so a large step is
safe.

The squared norm of a sum is the sum of the products of all pairs of devices. The pairs of a device
with itself contain the noise of its mini-batches (and of its privacy) and what only its own data
explain; the pairs of two devices do not. Two estimates follow:

    L   as if all members had reported twice: own + (members - 1) / (devices - 1) * others
    L_0 from the pairs of two devices alone, without noise

with own and others the sums over the two kinds of pairs; the variance of known privacy noise is
subtracted from own. All are computed on `COORDINATES` random coordinates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.strategy import Stateful
from latecomer.core.submodel import name_of

COORDINATES = 512  # random coordinates of bases and deltas on which L is measured
SAFE = 1.2  # largest gain * L, without delay
FIRST_GAIN = 2.0  # at least, before a device has reported twice
FIRST_MOVEMENT = 0.05  # of the model's norm, in its first fleet pass
MIN_GAIN = 0.25  # so that one hostile device cannot stop the model
MAX_GROWTH = 10.0  # factor per fleet pass
COORDINATE_STREAM = 0x57E9


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """Base and delta of a device's last update, on the measured coordinates of its sub-model.

    `change` and `move` are the differences to its previous update, None if there is none.
    `noise_std` is the privacy noise per coordinate of the delta, `noise` its variance in `change`.
    """

    submodel: str
    base: Tensor
    delta: Tensor
    weight: float
    noise_std: float = 0.0
    change: Tensor | None = None
    move: Tensor | None = None
    noise: float = 0.0


@portable
@dataclass(slots=True, eq=False)
class Changes:
    """Sums over the devices of a sub-model that have reported at least twice.

    change, move: weight * change and weight * movement.
    own_change, own_move: the squared norms of these terms.
    noise: the privacy noise in `own_change`.
    """

    change: Tensor
    move: Tensor
    own_change: float = 0.0
    own_move: float = 0.0
    noise: float = 0.0
    weight: float = 0.0
    devices: int = 0

    def add(self, visit: Visit, sign: int) -> None:
        """Add the terms of a visit (`sign` 1) or take them away (-1)."""
        if visit.change is None or visit.move is None:
            return
        change = visit.weight * visit.change.double()
        move = visit.weight * visit.move.double()
        self.change = self.change + sign * change
        self.move = self.move + sign * move
        self.own_change += sign * change.dot(change).item()
        self.own_move += sign * move.dot(move).item()
        self.noise += sign * visit.weight**2 * visit.noise * change.numel()
        self.weight += sign * visit.weight
        self.devices += sign

    def squares(self, own: float, others: float) -> tuple[float, float]:
        """Squared norms of the mean change and movement: their pairs times `own` and `others`."""
        scale = self.devices / self.weight**2  # several sub-models count by their devices
        change = self.change.dot(self.change).item() - self.own_change
        move = self.move.dot(self.move).item() - self.own_move
        return (
            scale * (own * (self.own_change - self.noise) + others * change),
            scale * (own * self.own_move + others * move),
        )


class MeasuredStep(Stateful):
    """Computes the gain: by how many mean updates the model moves per fleet pass."""

    kept = ("gain", "delay", "_visits", "_changes")

    def __init__(self) -> None:
        self.gain = FIRST_GAIN
        self.delay = 0.0  # mean staleness, in fleet passes
        self._visits: dict[int, Visit] = {}  # by device
        self._changes: dict[str, Changes] = {}  # by sub-model
        self._coordinates: dict[int, Tensor] = {}  # by number of parameters

    def advance(
        self,
        clipped: Sequence[tuple[Contribution, float]],
        members: int,
        seed: int,
        relative: float = math.inf,
    ) -> float:
        """The gain for a commit with these updates, each with the factor that clips its norm.

            gain <- max(least, min(1.2 / L, 10^p * gain, 1 / p))
            least = 1 if L_0 <= 1, else max(0.25, 1 / L_0)

        p is the number of fleet passes per commit, so 1 / p is one mean update per commit. Before a
        device has reported twice the gain is 0.05 / `relative` (the norm of the mean update over
        that of the model), at least 2. Returns gain / (1 + delay), with delay the running mean of
        the staleness in fleet passes.
        """
        passes = len(clipped) / members
        keep = max(0.5, 1.0 - passes)
        staleness = sum(contribution.staleness for contribution, _ in clipped) / members
        self.delay = keep * self.delay + (1.0 - keep) * staleness
        for contribution, factor in clipped:
            self._visit(contribution, factor, seed)
        least, measured = 1.0, self._lipschitz(members)
        if measured is None:
            first = max(FIRST_GAIN, FIRST_MOVEMENT / relative) if relative > 0 else FIRST_GAIN
            self.gain = min(first, 1.0 / passes)
        else:
            lipschitz, without_noise = measured
            safe = SAFE / lipschitz if lipschitz > 0 else math.inf
            self.gain = min(safe, self.gain * MAX_GROWTH**passes, 1.0 / passes)
            if without_noise > 1.0:
                least = max(MIN_GAIN, 1.0 / without_noise)
        self.gain = max(least, self.gain)
        return self.gain / (1.0 + self.delay)

    def forget(self, device: int) -> None:
        """Leave a device out of the measurement until it has reported twice again."""
        visit = self._visits.pop(device, None)
        if visit is not None and visit.change is not None:
            self._changes[visit.submodel].add(visit, -1)

    def _lipschitz(self, members: int) -> tuple[float, float] | None:
        """L and L_0; None before a base has moved between two updates of a device."""
        known = [each for each in self._changes.values() if each.devices]
        devices = sum(each.devices for each in known)
        found = np.zeros((3, 2))
        for each in known:
            share = members * each.devices / devices
            factor = max(0.0, (share - 1.0) / (each.devices - 1)) if each.devices > 1 else 0.0
            found += [each.squares(1, factor), each.squares(0, 1), each.squares(1, 0)]
        (change, move), (pairs, moves), (own_change, own_move) = found.tolist()
        if move <= 0:  # the movements of different devices point away from each other
            change, move = own_change, own_move
        if move <= 0:
            return None
        without_noise = math.sqrt(max(0.0, pairs) / moves) if moves > 0 else 0.0
        return math.sqrt(max(0.0, change) / move), without_noise

    def _visit(self, contribution: Contribution, factor: float, seed: int) -> None:
        """Replace the device's visit, and its terms in the sums."""
        index = self._measured(contribution.delta.numel(), seed)
        device, submodel = contribution.task.device, name_of(contribution.task.submodel)
        base, delta = contribution.base[index], contribution.delta[index] * factor
        before = self._visits.get(device)
        self.forget(device)
        noise_std = contribution.update.noise_std * factor
        visit = Visit(submodel, base, delta, contribution.weight, noise_std)
        if before is not None and before.submodel == submodel and contribution.weight > 0:
            visit = replace(
                visit,
                change=delta - before.delta,
                move=base - before.base,
                noise=noise_std**2 + before.noise_std**2,
            )
        self._visits[device] = visit
        if submodel not in self._changes:
            zero = torch.zeros(len(index), dtype=torch.float64)
            self._changes[submodel] = Changes(zero, zero)
        self._changes[submodel].add(visit, 1)

    def _measured(self, parameters: int, seed: int) -> Tensor:
        if parameters not in self._coordinates:
            rng = np.random.default_rng([seed, COORDINATE_STREAM, parameters])
            count = min(COORDINATES, parameters)
            chosen = np.sort(rng.choice(parameters, count, replace=False))
            self._coordinates[parameters] = torch.from_numpy(chosen)
        return self._coordinates[parameters]

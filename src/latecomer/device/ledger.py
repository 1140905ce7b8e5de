"""Privacy ledger of a device: its noisy releases, and their epsilon by composition (dp_accounting).

dp_accounting is imported inside functions: the import takes more than a second.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import inf, sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from latecomer.errors import BadInput, unknown

Kind = Literal["gaussian", "laplace"]
Accountant = Literal["pld", "rdp"]
# What neighbouring datasets differ in: the whole dataset of a device, one replaced example, or one
# example of gradient zero. An epsilon of one unit has no meaning for another.
Unit = Literal["", "update", "step", "sampled step"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)
UNITS: tuple[Unit, ...] = get_args(Unit)
PRECISION = 1e-4  # relative, of a calibrated multiplier
# Discretisation interval of a privacy loss over its spread. Any interval overestimates epsilon,
# these by less than 0.1%; Laplace losses end in a jump and are cheap to compute.
GRID: dict[Kind, float] = {"gaussian": 0.05, "laplace": 0.002}


@dataclass(frozen=True, slots=True, order=True)
class Release:
    """One noisy release of a function of a device's data.

    `multiplier` is the standard deviation of the noise (Laplace: its scale) over the sensitivity.
    `rate` is the probability of Poisson sampling of the examples; 1 is no sampling.
    """

    kind: Kind
    multiplier: float
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("noise", self.kind, KINDS)
        if not self.multiplier >= 0:
            raise BadInput(f"noise multiplier = {self.multiplier}: allowed is 0 or more")
        if not 0 < self.rate <= 1:
            raise BadInput(f"sampling rate = {self.rate}: allowed is above 0, at most 1")

    def event(self) -> Any:
        """The release as a DpEvent of dp_accounting."""
        import dp_accounting as dp

        noise = {"gaussian": dp.GaussianDpEvent, "laplace": dp.LaplaceDpEvent}[self.kind]
        event = noise(self.multiplier)
        return event if self.rate == 1 else dp.PoissonSampledDpEvent(self.rate, event)


History = tuple[tuple[Release, int], ...]


class Ledger:
    """The releases of one device, all of one unit: a count for each distinct release."""

    def __init__(self, history: Iterable[tuple[Release, int]] = (), unit: Unit = "") -> None:
        self.unit = unit
        self._counts: dict[Release, int] = {}
        for release, count in history:
            self.charge(release, count)

    @property
    def history(self) -> History:
        """(release, count) pairs, sorted: equal for ledgers of the same releases in any order."""
        return tuple(sorted(self._counts.items()))

    def use(self, unit: Unit) -> None:
        """Set the unit of all releases; BadInput if there are releases of another one."""
        if self.unit not in ("", unit):
            raise BadInput(
                f"the privacy ledger counts releases of unit '{self.unit}', the device's privacy"
                f" settings are of unit '{unit}': they have no common epsilon"
            )
        self.unit = unit

    def charge(self, release: Release, count: int = 1) -> None:
        """Add `count` releases."""
        if count < 0:
            raise ValueError(f"{count} releases: a release cannot be taken back")
        if count:
            self._counts[release] = self._counts.get(release, 0) + count

    def epsilon(self, delta: float, accountant: Accountant) -> float:
        """The epsilon of all releases so far at this delta."""
        return composed_epsilon(self.history, delta, accountant)

    def would_spend(
        self, release: Release, count: int, delta: float, accountant: Accountant
    ) -> float:
        """The epsilon after `count` more of this release."""
        after = Ledger([*self.history, (release, count)])
        return after.epsilon(delta, accountant)

    def affords(
        self, release: Release, count: int, budget: float, delta: float, accountant: Accountant
    ) -> bool:
        """Whether `would_spend` is at most `budget`.

        Counts are rounded up to powers of two while that fits, so that a run needs few
        compositions.
        """
        if self._counts.keys() - {release}:
            return self.would_spend(release, count, delta, accountant) <= budget
        total = self._counts.get(release, 0) + count
        power = 1 << max(total - 1, 0).bit_length()
        if composed_epsilon(((release, power),), delta, accountant) <= budget:
            return True
        return total <= _max_releases(release, power, budget, delta, accountant)

    def to_tensor(self) -> Tensor:
        """One row per distinct release: unit, kind (by their index), multiplier, rate, count."""
        unit = UNITS.index(self.unit)
        rows = [(unit, KINDS.index(r.kind), r.multiplier, r.rate, n) for r, n in self.history]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 5)

    @classmethod
    def from_tensor(cls, rows: Tensor) -> "Ledger":
        """The inverse of `to_tensor`."""
        units = {UNITS[int(unit)] for unit in rows[:, 0].tolist()} or {UNITS[0]}
        history = (
            (Release(KINDS[int(code)], multiplier, rate), int(count))
            for _, code, multiplier, rate, count in rows.tolist()
        )
        (unit,) = units
        return cls(history, unit)


@lru_cache(maxsize=2**16)  # the devices of a fleet share few histories
def composed_epsilon(history: History, delta: float, accountant: Accountant) -> float:
    """The epsilon at `delta` of the adaptive composition of all releases.

    Noise is relative to the sensitivity of each release. Which datasets are neighbours is decided
    where the noise is added, and must be the same for all releases of a history.
    """
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    if not 0 < delta < 1:
        raise BadInput(f"delta = {delta}: allowed is above 0 and below 1")
    history = tuple((r, count) for r, count in history if count and r.multiplier < inf)
    if any(r.multiplier == 0 for r, _ in history):
        return inf
    plain = [(r, count) for r, count in history if r.kind == "gaussian" and r.rate == 1]
    others = [(r, count) for r, count in history if r.kind != "gaussian" or r.rate < 1]
    if plain:
        # Adaptive Gaussians compose to exactly one Gaussian. Dong et al. 2022, Corollary 3.3.
        power = sum(count / r.multiplier**2 for r, count in plain)
        others.append((Release("gaussian", 1 / sqrt(power)), 1))
    if not others:
        return 0.0
    return _rdp(others, delta) if accountant == "rdp" else _pld(others, delta)


def _pld(history: list[tuple[Release, int]], delta: float) -> float:
    import dp_accounting as dp

    (first, _), *more = history
    if not more and first.kind == "gaussian" and first.rate == 1:
        # Exact (Balle and Wang 2018); a discretised loss takes seconds for a large epsilon.
        return float(dp.get_epsilon_gaussian(first.multiplier, delta))
    grid = min(GRID[r.kind] * r.rate / r.multiplier for r, _ in history)
    losses = (_loss(release, grid).self_compose(count) for release, count in history)
    return float(reduce(lambda a, b: a.compose(b), losses).get_epsilon_for_delta(delta))


@lru_cache(maxsize=256)
def _loss(release: Release, grid: float) -> Any:
    """The privacy loss distribution of one release.

    With dp_accounting's default relation ADD_OR_REMOVE_ONE: under REPLACE_ONE it doubles the
    sensitivity, and the multiplier here is relative to the sensitivity of replacing already.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    made = {"gaussian": pld.from_gaussian_mechanism, "laplace": pld.from_laplace_mechanism}
    return made[release.kind](
        release.multiplier, sampling_prob=release.rate, value_discretization_interval=grid
    )


def _rdp(history: list[tuple[Release, int]], delta: float) -> float:
    from dp_accounting import rdp

    total = sum(count * _divergences(release) for release, count in history)
    return float(rdp.compute_epsilon(rdp.RdpAccountant().orders, total, delta)[0])


@lru_cache(maxsize=1024)
def _divergences(release: Release) -> Any:
    """The Rényi divergences of one release at the default orders of dp_accounting."""
    import dp_accounting as dp

    # It warns of every order that it leaves out, which can only overestimate epsilon.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return dp.rdp.RdpAccountant().compose(release.event()).rdp
    except dp.UnsupportedEventError as error:
        raise BadInput(
            f"RDP cannot account for {release.kind} noise on sampled examples: "
            f"use accountant = 'pld'"
        ) from error
    finally:
        logger.setLevel(level)


@lru_cache(maxsize=2**16)
def _max_releases(
    release: Release, power: int, budget: float, delta: float, accountant: Accountant
) -> int:
    """The largest count of at least `power` // 2 that fits the budget; `power` does not fit."""
    low, high = power // 2, power
    while high - low > 1:
        middle = (low + high) // 2
        if composed_epsilon(((release, middle),), delta, accountant) <= budget:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=1024)
def multiplier_for(
    epsilon: float, delta: float, kind: Kind, rate: float, releases: int, accountant: Accountant
) -> float:
    """The smallest multiplier with which `releases` releases compose to at most `epsilon`.

    It is at most a factor 1 + `PRECISION` too large, and never too small.
    """
    if not epsilon > 0:
        raise BadInput(f"epsilon = {epsilon}: allowed is above 0")
    if releases < 1:
        raise BadInput(f"{releases} releases: allowed is 1 or more")
    if epsilon == inf:
        return 0.0

    def fits(multiplier: float) -> bool:
        history = ((Release(kind, multiplier, rate), releases),)
        return composed_epsilon(history, delta, accountant) <= epsilon

    high = 1.0
    while not fits(high):
        high *= 2
    low = high / 2
    while fits(low):
        low, high = low / 2, low
    while high > low * (1 + PRECISION):
        middle = sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high

"""Aggregation over cached updates: every commit averages the last update of every device.

Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability, 2021 (MIFA):
the server caches the last delta of every device and steps by the mean of the cache, so devices that
answer seldom count as much as those that answer often. Here a commit follows a share of the fleet
instead of a round, and outdated cached updates are replaced by surrogates. A *fleet pass* is the
number of commits in which as many updates arrive as the lineage has devices.

Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration, 2024 (CA2FL), after SAGA (Defazio et al. 2014): the mean change of the updates that
have just arrived is the variance-reduced correction, applied for all devices.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution, Update
from latecomer.core.strategy import Commit, ServerView, Stateful
from latecomer.core.submodel import Submodel, covered, name_of
from latecomer.strategies.parts.merging import Surrogates
from latecomer.strategies.parts.quota import quota

FORGET_AFTER_PASSES = 3  # fleet passes after which the cached update of an absent device is dropped
WEIGHT_CAP = 10.0  # times the median weight of the cache


@portable
@dataclass(frozen=True, slots=True, eq=False)
class CachedUpdate:
    """The last delta of a device, or a surrogate for it."""

    delta: Tensor
    submodel: Submodel | None
    weight: float
    version: int  # commits when it arrived
    rms: float  # root mean square of the delta
    signal: float = 1.0  # share of its squared norm that is not privacy noise
    position: float | None = None  # of its base along the delta, in lengths of it; None: unknown


def cached_update(
    contribution: Contribution, version: int, base: Tensor | None = None
) -> CachedUpdate:
    """The cache entry of a contribution; with `base` its position is kept for damping."""
    delta, submodel = contribution.delta, contribution.task.submodel
    rms = rms_of(delta, delta.numel())
    signal = signal_share(rms, contribution.update)
    position = None if base is None else position_along(delta, rms, base)
    return CachedUpdate(delta, submodel, contribution.weight, version, rms, signal, position)


def signal_share(rms: float, update: Update) -> float:
    """1 - noise variance / rms^2 of a delta, at least 0; 0 if its noise is unknown."""
    noise = update.noise_std
    if not noise:
        return 0.0 if update.epsilon else 1.0  # after Adam the noise in the delta is unknown
    return 1.0 - (noise / rms) ** 2 if noise < rms else 0.0


def noise_aware_weight(signal: float, ratio: float) -> float:
    """The factor on a new update if the cache weighs `ratio` times as much as the new updates.

    The noise part counts once, with the sum that it would have over all commits of a fleet pass.
    """
    return signal + (1.0 - signal) * ratio


def rms_of(delta: Tensor, coordinates: int) -> float:
    """Root mean square over `coordinates`; further ones are 0."""
    norm: float = delta.norm().item()
    return norm / math.sqrt(max(1, coordinates))


class CachedAggregation(Stateful):
    """Merge: after `share` * devices arrivals, commit the weighted mean of all cached updates.

    w <- w + s * mean(cache), s = `server_lr` * (different devices arrived) / devices, at most 1:
    `server_lr` is the step per fleet pass. Devices are those of the lineage that are idle, working
    or cached. Options:

    share: arrivals per commit, as a share of the devices; a device may count twice. 0: 1 arrival.
    norm_clip: cached updates are clipped to this times their median RMS (0: no clipping).
    age_discount: an update a > 1 fleet passes old has its weight multiplied by a^-age_discount.
    control_variate: share of the variance-reduced correction: 0 is MIFA, 1 is CA2FL.
    trust_region: bounds the displacement by the mean per fleet pass to this times the median update
        RMS, and shortens the correction by as much (0: no bound).
    projection_damping: share of the distance the model has already moved along a cached update
        since its base, which is taken off that update (0: none).

    Privacy noise is not repeated: the signal share of an update counts in every commit, its noise
    share only in the commit after its arrival, times the commits of a fleet pass. Correction
    and trust region are scaled by the median signal share, so they vanish for pure noise.
    `surrogates` replace cached updates older than a fleet pass; these keep their age discount.
    """

    kept = ("_cache", "_arrived", "_replaced")

    def __init__(
        self,
        share: float,
        server_lr: float,
        norm_clip: float,
        age_discount: float = 0.0,
        control_variate: float = 0.0,
        trust_region: float = 0.0,
        projection_damping: float = 0.0,
        surrogates: Surrogates | None = None,
    ) -> None:
        self.share, self.server_lr, self.norm_clip = share, server_lr, norm_clip
        self.age_discount, self.control_variate = age_discount, control_variate
        self.trust_region, self.projection_damping = trust_region, projection_damping
        self.surrogates = surrogates
        self._cache: dict[str, dict[int, CachedUpdate]] = {}  # by lineage and device
        self._arrived: dict[str, list[int]] = {}  # devices since the last commit
        self._replaced: dict[str, dict[int, CachedUpdate]] = {}  # their cached updates before

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        lineage, device = contribution.lineage, contribution.task.device
        arrived = self._arrived.setdefault(lineage, [])
        replaced = self._replaced.setdefault(lineage, {})
        cache = self._cache.setdefault(lineage, {})
        if self.control_variate and device in cache and device not in arrived:
            replaced[device] = cache[device]
        for cached in self._cache.values():
            cached.pop(device, None)  # a device is a member of one lineage at a time
        base = self._base(contribution, view)
        cache[device] = cached_update(contribution, view.store.commits, base)
        arrived.append(device)
        members = self._count_members(lineage, view)
        if len(arrived) < quota(self.share, members):
            return None
        del self._arrived[lineage], self._replaced[lineage]
        fleet_pass = members / len(arrived) * len(view.store.lineages)  # in commits
        self._forget(cache, fleet_pass, view)
        surrogates = self._renew(lineage, fleet_pass, view)
        new, head = {*arrived}, view.store.head_params(lineage)
        step = min(1.0, self.server_lr * len(new) / members)
        signal = median(cached.signal for cached in cache.values())
        discounted = [self._discounted(cached, fleet_pass, view) for cached in cache.values()]
        factors = self._noise_aware_weights(cache, discounted, new)
        params = stepped(head, discounted, step, self.norm_clip, self.projection_damping, factors)
        within = self._trusted_share(params - head, discounted, members / len(new), signal)
        changes = [
            (before, cache[d])
            for d, before in replaced.items()
            if d in cache and name_of(before.submodel) == name_of(cache[d].submodel)
        ]
        if changes:
            share = self.control_variate * signal
            params = corrected(params, changes, discounted, share, step, self.norm_clip)
        if within < 1:
            params = torch.lerp(head, params, within)
        return Commit(lineage, params, len(arrived), surrogates)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def _noise_aware_weights(
        self, cache: Mapping[int, CachedUpdate], discounted: Sequence[CachedUpdate], new: Set[int]
    ) -> list[float] | None:
        """A factor for every cached update; None where no update has noise."""
        if all(cached.signal == 1.0 for cached in discounted):
            return None
        weight_cap, _ = bounds(discounted, self.norm_clip)
        weights = [min(cached.weight, weight_cap) for cached in discounted]
        of_new = [weight for device, weight in zip(cache, weights, strict=True) if device in new]
        ratio = math.fsum(weights) / math.fsum(of_new)
        return [
            noise_aware_weight(cached.signal, ratio) if device in new else cached.signal
            for device, cached in cache.items()
        ]

    def _trusted_share(
        self, move: Tensor, cache: Sequence[CachedUpdate], commits: float, signal: float
    ) -> float:
        """The share of `move` that stays in the trust region if each commit of a pass makes it."""
        if not self.trust_region:
            return 1.0
        radius = self.trust_region * median_rms(cache)
        distance = rms_of(move, widest(cache)) * commits
        within = radius / distance if 0 < radius < distance else 1.0
        return within if signal == 1.0 else 1.0 - signal * (1.0 - within)

    def _base(self, contribution: Contribution, view: ServerView) -> Tensor | None:
        """Its base, if damping is on and the base is of the lineage the update is merged into."""
        if not self.projection_damping:
            return None
        here = view.store.resolve(contribution.task.lineage) == contribution.lineage
        return contribution.base if here else None

    def _discounted(
        self, cached: CachedUpdate, fleet_pass: float, view: ServerView
    ) -> CachedUpdate:
        passes = (view.store.commits - cached.version) / fleet_pass
        if not self.age_discount or passes <= 1.0:
            return cached
        return replace(cached, weight=cached.weight * passes**-self.age_discount)

    def _count_members(self, lineage: str, view: ServerView) -> int:
        """Devices of the lineage that are idle, working, or have a cached update."""
        cache = self._cache[lineage]
        present = [d for devices in (view.idle, view.working) for d in devices if d not in cache]
        if len(view.store.lineages) > 1:
            present = [device for device in present if view.lineage_of(device) == lineage]
        return len(present) + len(cache)

    def _forget(self, cache: dict[int, CachedUpdate], fleet_pass: float, view: ServerView) -> None:
        """Drop the cached updates of devices that have been absent for several fleet passes."""
        for device, cached in list(cache.items()):
            absent = device not in view.working and device not in view.idle
            if absent and view.store.commits - cached.version > FORGET_AFTER_PASSES * fleet_pass:
                del cache[device]

    def _renew(self, lineage: str, fleet_pass: float, view: ServerView) -> int:
        """Replace cached updates older than a fleet pass by surrogates; returns how many."""
        if self.surrogates is None:
            return 0
        cache, now = self._cache[lineage], view.store.commits
        fresh = [device for device, cached in cache.items() if now - cached.version <= fleet_pass]
        renewed = self.surrogates(lineage, fresh, view)
        for surrogate in renewed:
            cached = cache.get(surrogate.task.device)
            version = now if cached is None else cached.version
            base = self._base(surrogate, view)
            cache[surrogate.task.device] = cached_update(surrogate, version, base)
        return len(renewed)

    def on_absorb(self, into: str, gone: str) -> None:
        """Drop the cache of `gone`; its devices enter that of `into` with their next update."""
        for kept in (self._cache, self._arrived, self._replaced):
            kept.pop(gone, None)


def median_rms(cache: Iterable[CachedUpdate]) -> float:
    return median(cached.rms for cached in cache)


def widest(cache: Iterable[CachedUpdate]) -> int:
    """The number of covered coordinates: narrower networks are corners of wider ones."""
    return max(cached.delta.numel() for cached in cache)


def stepped(
    head: Tensor,
    cache: Sequence[CachedUpdate],
    step: float,
    norm_clip: float,
    damping: float = 0.0,
    noise_factors: Sequence[float] | None = None,
) -> Tensor:
    """head + step * weighted mean of the cache, per coordinate over the updates that cover it.

    Each update is multiplied by its clipping, damping and noise factor, which leave its share of
    the total weight unchanged.
    """
    weight_cap, max_rms = bounds(cache, norm_clip)
    weights = [min(cached.weight, weight_cap) for cached in cache]
    noise_factors = [1.0] * len(cache) if noise_factors is None else noise_factors
    factors = [
        noise * weight * clip_factor(cached, max_rms) * remaining(cached, head, damping)
        for cached, weight, noise in zip(cache, weights, noise_factors, strict=True)
    ]
    total = torch.zeros_like(head)
    if all(cached.submodel is None for cached in cache):
        for cached, factor in zip(cache, factors, strict=True):
            total.add_(cached.delta, alpha=factor)
        return torch.add(head, total, alpha=step / math.fsum(weights))
    share = torch.zeros_like(head)
    for cached, weight, factor in zip(cache, weights, factors, strict=True):
        index = covered(cached.submodel)
        total[index] += factor * cached.delta
        share[index] += weight
    return torch.where(share > 0, head + step * total / share, head)


def remaining(cached: CachedUpdate, head: Tensor, damping: float) -> float:
    """1 - damping * d, with d in [0, 1] how far the model has moved along the update."""
    if not damping or cached.position is None:
        return 1.0
    position = position_along(cached.delta, cached.rms, head[covered(cached.submodel)])
    return 1.0 - damping * min(1.0, max(0.0, position - cached.position))


def position_along(delta: Tensor, rms: float, params: Tensor) -> float:
    """<params, delta> / |delta|^2: the projection of `params` on the delta, in lengths of it."""
    square = rms * rms * delta.numel()
    # A dot product would depend on memory alignment, and with it a resumed run.
    product: float = (params * delta).sum(dtype=torch.float64).item()
    return product / square if square > 0 else 0.0


def corrected(
    params: Tensor,
    changes: Sequence[tuple[CachedUpdate, CachedUpdate]],
    cache: Sequence[CachedUpdate],
    share: float,
    step: float,
    norm_clip: float,
) -> Tensor:
    """params + step * (share - s) * mean change, the variance-reduced correction.

    `changes` are cached updates before and after an arrival; s, their share of the total weight, is
    in the mean of the cache already. Per coordinate, over the updates that cover it. Damping is not
    applied to the changes.
    """
    weight_cap, max_rms = bounds(cache, norm_clip)
    total = torch.zeros_like(params)
    # Where all train the whole model, every coordinate has the same weight.
    whole = all(cached.submodel is None for cached in cache)
    changed, all_weights = (
        params.new_zeros(1) if whole else torch.zeros_like(params) for _ in range(2)
    )
    for before, after in changes:
        weight, index = min(after.weight, weight_cap), covered(after.submodel)
        clipped = clip_factor(after, max_rms) * after.delta
        total[index] += weight * (clipped - clip_factor(before, max_rms) * before.delta)
        changed[index] += weight
    for cached in cache:
        all_weights[covered(cached.submodel)] += min(cached.weight, weight_cap)
    missing = (share - changed / all_weights).clamp_min(0.0)
    return torch.where(changed > 0, params + step * missing * total / changed, params)


def bounds(cache: Sequence[CachedUpdate], norm_clip: float) -> tuple[float, float]:
    """The weight cap, and the largest RMS of an update (0: no bound)."""
    return WEIGHT_CAP * median(cached.weight for cached in cache), norm_clip * median_rms(cache)


def clip_factor(cached: CachedUpdate, max_rms: float) -> float:
    """The factor that clips an update to `max_rms`; 0 is no bound."""
    return max_rms / cached.rms if max_rms and cached.rms > max_rms else 1.0

"""Aggregation over cached updates: every commit averages the last update of every device.

Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability, 2021 (MIFA):
the server caches the last delta of every device and steps by the mean of the cache, so devices that
answer seldom count as much as those that answer often. Here a commit follows a share of the fleet
instead of a round. A *fleet pass* is as many updates as the lineage has members.

Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration, 2024 (CA2FL), after SAGA (Defazio et al. 2014): the variance-reduced correction adds
the mean change of the updates that have just arrived to the mean of the cache. With h the mean of
the cache that already holds them, and r the share of the weights that is theirs, CA2FL steps by
h + (1 - r) * change; MIFA steps by h. The length of the step is measured (`measured_step`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution, Update
from latecomer.core.strategy import Commit, ServerView, Stateful
from latecomer.core.submodel import Submodel, covered, name_of
from latecomer.strategies.latecomer.measured_step import MeasuredStep
from latecomer.strategies.parts.merging import Surrogates, buffers_from
from latecomer.strategies.parts.quota import quota

NORM_CLIP = 2.0  # times the median norm of the devices' last updates
MAX_UPDATES = 10  # per commit
CORRECTION = 0.3  # share of the variance-reduced correction: 0 is MIFA, 1 is CA2FL
FORGET_AFTER_PASSES = 3  # fleet passes after which the cached update of an absent device is dropped


@portable
@dataclass(frozen=True, slots=True, eq=False)
class CachedUpdate:
    """The last delta of a device after clipping, or a surrogate for it."""

    delta: Tensor
    submodel: Submodel | None
    weight: float
    version: int  # commits when it arrived
    rms: float  # root mean square of the delta before clipping


@portable
@dataclass(slots=True, eq=False)
class LineageCache:
    """The cached updates of a lineage and their weighted sum."""

    updates: dict[int, CachedUpdate]
    total: Tensor  # sum of weight * delta, in double precision
    weight: Tensor  # sum of weights: one value, or with sub-models one per coordinate
    arrived: dict[int, Contribution]  # since the last commit, by device
    count: int  # updates since the last commit
    members: int  # devices at the last commit


class CachedAggregation(Stateful):
    """Merge: after ceil(`share` * members) updates, at most 10, commit with the mean of the cache.

        w <- w + min(1, gain * reported / members) * (h + 0.3 * (1 - r) * change)

    members: number of devices of the lineage that are idle, working or cached.
    reported: number of devices with an update since the last commit; only their last one counts.
    h: mean of the cache with these updates and surrogates, weighted by the contributions' weights.
    change: weighted mean of cached delta - previously cached delta, over the devices that reported
        and had a cached update of the same sub-model; r is their share of the weights in the cache.
    gain: mean updates per fleet pass, from `step`.

    A delta is clipped to twice the median root mean square of all devices' last deltas. Weights do
    not depend on age. Cached updates that arrived more than a fleet pass ago are replaced by
    `surrogates`, where there is one. With privacy noise the gain is 1 + q * (gain - 1) and the
    correction is multiplied by q, the median `signal_share` of the updates that arrived. Buffers
    (BatchNorm statistics) are averaged instead: they move to the weighted mean of the devices that
    reported by reported / cached, so that a variance stays between those of devices.
    """

    kept = ("_caches",)

    def __init__(
        self, share: float, step: MeasuredStep, surrogates: Surrogates | None = None
    ) -> None:
        self.share, self.step, self.surrogates = share, step, surrogates
        self._caches: dict[str, LineageCache] = {}

    def updates_per_commit(self, members: int) -> int:
        return min(MAX_UPDATES, quota(self.share, members))

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        lineage, device = contribution.lineage, contribution.task.device
        cache = self._caches.get(lineage)
        if cache is None:
            cache = self._caches[lineage] = self._opened(lineage, view)
        cache.arrived[device] = contribution
        cache.count += 1
        enough = cache.count >= self.updates_per_commit(cache.members)
        return self._commit(lineage, cache, view) if enough else None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def _opened(self, lineage: str, view: ServerView) -> LineageCache:
        head = view.store.head_params(lineage)
        total = torch.zeros_like(head, dtype=torch.float64)
        cache = LineageCache({}, total, torch.zeros(1, dtype=torch.float64), {}, 0, 1)
        cache.members = self._count_members(lineage, cache, view)
        return cache

    def _commit(self, lineage: str, cache: LineageCache, view: ServerView) -> Commit:
        head, members, arrivals = view.store.head_params(lineage), cache.members, len(cache.arrived)
        for each in self._caches.values():
            each.total = each.total.clone()  # a state that was saved shares the tensor
            each.weight = each.weight.clone()
        norms = {device: _rms(c.delta) for device, c in cache.arrived.items()}
        known = {device: each.rms for device, each in cache.updates.items()} | norms
        limit = NORM_CLIP * median(known.values())
        clipped = [
            (c, limit / norms[device] if norms[device] > limit else 1.0)
            for device, c in cache.arrived.items()
        ]
        change, changed = torch.zeros_like(head), torch.zeros_like(cache.weight)
        for contribution, factor in clipped:
            rms = norms[contribution.task.device]
            before, after = self._put(cache, contribution, factor, rms, view)
            if before is not None and name_of(before.submodel) == name_of(after.submodel):
                index = covered(after.submodel)
                changed = _add_weight(changed, after, after.weight, head)
                change[index] += after.weight * (after.delta - before.delta)
        signal = median(signal_share(norms[d], c.update) for d, c in cache.arrived.items())
        fleet_pass = members / arrivals * len(view.store.lineages)  # in commits
        self._forget(cache, fleet_pass, view)
        surrogates = self._renew(lineage, cache, fleet_pass, view)
        direction = _ratio(cache.total, cache.weight).to(head.dtype)
        begin = buffers_from(view)
        relative = _relative(direction[:begin], head[:begin])
        gain = self.step.advance(clipped, members, view.seed, relative)
        step = min(1.0, (1.0 + signal * (gain - 1.0)) * arrivals / members)
        missing = 1.0 - _ratio(changed, cache.weight).to(head.dtype)
        direction += CORRECTION * signal * missing * _ratio(change, changed.to(head.dtype))
        params = torch.add(head, direction, alpha=step)
        if begin is not None:
            where = slice(begin, None)
            share = arrivals / len(cache.updates)
            params[where] = torch.lerp(head[where], _mean_trained(cache.arrived, where), share)
        count, cache.arrived, cache.count = cache.count, {}, 0
        cache.members = self._count_members(lineage, cache, view)
        return Commit(lineage, params, count, surrogates)

    def _put(
        self,
        cache: LineageCache,
        contribution: Contribution,
        factor: float,
        rms: float,
        view: ServerView,
        version: int | None = None,
    ) -> tuple[CachedUpdate | None, CachedUpdate]:
        """Cache the delta times `factor`; returns the cached update it replaces, and the new one.

        `version` is its time of arrival in commits (None: now).
        """
        device = contribution.task.device
        before = self._drop(device, cache)
        delta = contribution.delta if factor == 1.0 else factor * contribution.delta
        version = view.store.commits if version is None else version
        after = CachedUpdate(delta, contribution.task.submodel, contribution.weight, version, rms)
        cache.updates[device] = after
        cache.total[covered(after.submodel)] += after.weight * delta.double()
        cache.weight = _add_weight(cache.weight, after, after.weight, cache.total)
        return before, after

    def _drop(self, device: int, cache: LineageCache) -> CachedUpdate | None:
        """Remove a device from all caches; returns its cached update in `cache`."""
        found = None
        for each in self._caches.values():
            before = each.updates.pop(device, None)
            if before is not None:
                each.total[covered(before.submodel)] -= before.weight * before.delta.double()
                each.weight = _add_weight(each.weight, before, -before.weight, each.total)
                found = before if each is cache else found
        return found

    def _count_members(self, lineage: str, cache: LineageCache, view: ServerView) -> int:
        """Devices of the lineage that are idle, working, or have a cached update."""
        return max(1, len(_present(lineage, view) | cache.updates.keys()))

    def _forget(self, cache: LineageCache, fleet_pass: float, view: ServerView) -> None:
        """Drop cached updates older than `FORGET_AFTER_PASSES` of devices neither idle nor working.

        `fleet_pass` is the length of a fleet pass in commits.
        """
        oldest = view.store.commits - FORGET_AFTER_PASSES * fleet_pass
        for device, cached in list(cache.updates.items()):
            absent = device not in view.working and device not in view.idle
            if absent and cached.version < oldest:
                self._drop(device, cache)
                self.step.forget(device)

    def _renew(self, lineage: str, cache: LineageCache, fleet_pass: float, view: ServerView) -> int:
        """Replace or add surrogates for devices without an update of the last fleet pass.

        A surrogate keeps the time of arrival of the update it replaces, so it is replaced again at
        the next commit. Without a surrogate the cached update stays. Returns their number.
        """
        if self.surrogates is None:
            return 0
        now = view.store.commits
        fresh = [d for d, cached in cache.updates.items() if now - cached.version <= fleet_pass]
        renewed = self.surrogates(lineage, fresh, view)
        for surrogate in renewed:
            cached = cache.updates.get(surrogate.task.device)
            version = now if cached is None else cached.version
            self._put(cache, surrogate, 1.0, _rms(surrogate.delta), view, version)
        return len(renewed)

    def on_absorb(self, into: str, gone: str) -> None:
        """Drop the cache of `gone`; its devices enter that of `into` with their next update."""
        self._caches.pop(gone, None)


def _present(lineage: str, view: ServerView) -> set[int]:
    """Devices of the lineage that are idle or working."""
    present = {*view.idle, *view.working}
    if len(view.store.lineages) > 1:
        present = {device for device in present if view.lineage_of(device) == lineage}
    return present


def _mean_trained(arrived: Mapping[int, Contribution], where: slice) -> Tensor:
    """The weighted mean of the devices' trained values at `where`."""
    total = math.fsum(c.weight for c in arrived.values())
    parts = [c.weight / total * (c.base[where] + c.delta[where]) for c in arrived.values()]
    return torch.stack(parts).sum(0)


def signal_share(rms: float, update: Update) -> float:
    """1 - noise_std^2 / rms^2: the share of a delta's squared norm that is not noise, at least 0.

    1 without privacy; 0 if the update is private and its noise is unknown.
    """
    noise = update.noise_std
    if not noise:
        return 0.0 if update.epsilon else 1.0  # after Adam the noise in the delta is unknown
    return 1.0 - (noise / rms) ** 2 if noise < rms else 0.0


def _relative(update: Tensor, params: Tensor) -> float:
    """The norm of the update over that of the parameters; infinite if these are 0."""
    norm = float(params.norm())
    return float(update.norm()) / norm if norm > 0 else math.inf


def _rms(delta: Tensor) -> float:
    return float(delta.norm()) / math.sqrt(max(1, delta.numel()))


def _add_weight(weights: Tensor, cached: CachedUpdate, weight: float, like: Tensor) -> Tensor:
    """`weights` with `weight` added where the update trains; expanded for the first sub-model."""
    if cached.submodel is not None and weights.numel() == 1:
        weights = weights.expand(like.numel()).clone()
    weights[covered(cached.submodel)] += weight
    return weights


def _ratio(total: Tensor, weights: Tensor) -> Tensor:
    """total / weights, 0 where no update has a weight."""
    return torch.where(weights > 0, total / weights, 0.0)

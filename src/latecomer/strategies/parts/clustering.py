"""Clustering of devices, one lineage per cluster: assignment, splits and merges.

Li et al. 2024 (EchoPFL), section 4. Parameter distances and label frequencies cannot separate
devices whose labels are permuted. So, beside the paper: a device with a high local error is sent
all cluster models and trains the one with the least loss on its data, and a new cluster starts from
the model of one device, its seed device.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, TrainSpec
from latecomer.core.strategy import Absorb, Assignment, Observer, ServerView
from latecomer.core.submodel import covered, take
from latecomer.strategies.parts.cluster_merge import ClusterDistances, merged_params
from latecomer.strategies.parts.cluster_state import (
    ClusterState,
    DevicesByLineage,
    MemberState,
    is_distribution,
    per_class,
)
from latecomer.strategies.parts.quota import quota

Measure = Literal["feedback", "error"]

WORST_SHARE = 0.2  # share of a cluster's members whose error decides about a split
MIN_MEMBERS = 4  # a cluster with fewer is not split
STUCK_AFTER = 2  # reviews without improvement after which a cluster no longer learns
IMPROVEMENT = 0.9  # times the smallest median error so far: the bound for an improvement
MAX_REST = 64  # reviews, the longest pause between two splits of a cluster
SEED_UPLOADS = 4  # uploads of the seed device before other devices are offered its cluster
UPLOADS_BETWEEN_OFFERS = 2  # uploads of a device between two offers of all models, at least


class Clustering(Observer):
    """Route: an upload goes to the nearest cluster model; clusters are reviewed regularly.

    The first `initial` uploads seed the clusters. A device changes its cluster only if another
    model is at most `margin` times as far. A device whose error is above (1 + `gap`) * median, and
    every device at every `ask`-th upload, is offered all models and takes the one with the
    least loss.

    A cluster is reviewed after `every` uploads. It is split if the errors of the worst fifth of its
    members exceed both `need` and (1 + `gap`) times the median, or if its median error stays above
    `need`: the device with the largest error seeds a new cluster, offered to devices with high
    errors. A cluster that only its seed device uses is closed again. With more than `max_clusters`
    the closest two are merged.
    With `partial` a new cluster first trains its output layer alone.
    """

    kept = ("_named", "_members", "_clusters", "_seeds", "_merging", "_direction", "_median_error")

    def __init__(
        self,
        initial: int = 2,
        max_clusters: int = 4,
        every: int = 20,
        margin: float = 0.8,
        gap: float = 1.0,
        need: float = 0.2,
        measure: Measure = "error",
        ask: int = 10,
        partial: bool = True,
    ) -> None:
        self.initial, self.max_clusters = initial, max_clusters
        self.every, self.margin = every, margin
        self.gap, self.need, self.measure, self.ask = gap, need, measure, ask
        self.partial = partial
        self.seed_task = -1  # the task whose update becomes the model of a new cluster
        self._named = 0  # clusters named so far
        self._members: dict[int, MemberState] = {}
        self._clusters: dict[str, ClusterState] = {}
        self._seeds: dict[int, str] = {}  # device -> the cluster that its next upload starts
        self._merging: tuple[str, str] | None = None  # pair to merge, once `_direction` is known
        self._direction: Tensor | None = None
        self._median_error = math.inf  # over all devices

    # Route: the assignment of devices to clusters.

    def __call__(self, contribution: Contribution, view: ServerView) -> str:
        device = contribution.task.device
        first = device not in self._members
        self._record_feedback(self._members.setdefault(device, MemberState()), contribution)
        lineage = self._choose(contribution, first, view)
        self._clusters.setdefault(lineage, ClusterState()).merges += 1
        self._open_if_ready(lineage)
        if self._merging and self._direction is None and contribution.lineage == self._merging[0]:
            self._direction = _whole_delta(contribution, view)
        return lineage

    def _record_feedback(self, member: MemberState, contribution: Contribution) -> None:
        metrics = contribution.update.metrics
        member.uploads += 1
        member.error = float(metrics.get(self.measure, math.nan))
        mean = per_class(metrics, "soft")
        usable = is_distribution(mean)
        member.mean_prediction = torch.tensor(mean, dtype=torch.float64) if usable else None
        if contribution.task.id == member.offer_task:
            losses = ((name, metrics.get(f"loss_{i}")) for i, name in enumerate(member.offered))
            member.losses = {n: float(loss) for n, loss in losses if loss is not None and loss >= 0}
            member.reports_losses = bool(member.losses)

    def _choose(self, contribution: Contribution, first: bool, view: ServerView) -> str:
        device, own = contribution.task.device, contribution.lineage
        if self._named < self.initial:
            self._named += 1
            if self.initial > 1:
                self.seed_task = contribution.task.id
            return own if self._named == 1 else self._new_name()
        if device in self._seeds:
            self.seed_task = contribution.task.id
            return self._seeds.pop(device)
        if len(view.store.lineages) == 1:
            return own
        distances = self.distances(contribution, view)
        nearest = min(distances, key=distances.__getitem__)
        stays = not first and distances[nearest] > self.margin * distances[own]
        return own if stays else nearest

    def distances(self, contribution: Contribution, view: ServerView) -> dict[str, float]:
        """L1 from the trained model to every cluster model, on the trained coordinates. Eq. 1."""
        model, submodel = contribution.base + contribution.delta, contribution.task.submodel
        names = view.store.lineages
        centres = [take(view.store.head_params(name), submodel) for name in names]
        # One tensor operation for all: this runs for every update.
        found = torch.stack(centres).sub_(model).abs_().sum(1).tolist()
        return dict(zip(names, found, strict=True))

    def _open_if_ready(self, name: str) -> None:
        """Offer a cluster to all devices with a high error once its seed device has trained it."""
        cluster = self._clusters[name]
        if cluster.open or self._seed_uploads(cluster) < SEED_UPLOADS:
            return
        cluster.open, cluster.fresh = True, False
        for member in self._members.values():
            if member.error > self.need:
                member.offered_at = -self.ask

    def _seed_uploads(self, cluster: ClusterState) -> int:
        """Uploads of its seed device since the cluster was started."""
        return self._members[cluster.seed_device].uploads - cluster.seeded_at

    def _new_name(self) -> str:
        return f"cluster-{self._named - 1}"

    # Dispatch: which model a device gets.

    def assignment(self, device: int, task: int, view: ServerView) -> Assignment:
        """The device's next task, which has this id; with all models if it may change cluster."""
        lineage, member = view.lineage_of(device), self._members.get(device)
        spec = self._spec(lineage, view)
        if member is None or device in self._seeds or not self._is_offered_all(member, view):
            return Assignment(device, lineage, spec)
        others = tuple(n for n in view.store.lineages if n != lineage and self._clusters[n].open)
        if not others:
            return Assignment(device, lineage, spec)
        member.offered_at, member.offer_task = member.uploads, task
        member.offered = (lineage, *others)
        return Assignment(device, lineage, spec, others)

    def _spec(self, lineage: str, view: ServerView) -> TrainSpec | None:
        """The training program if it differs from the run's, else None."""
        fresh = self._clusters.get(lineage, ClusterState()).fresh
        return replace(view.spec, last_layer_only=True) if fresh else None

    def _is_offered_all(self, member: MemberState, view: ServerView) -> bool:
        since = member.uploads - member.offered_at
        if not self.ask or not member.reports_losses or len(view.store.lineages) == 1:
            return False
        if member.offer_task in view.open_tasks:
            return False  # it has been offered them and has not answered yet
        if since < min(UPLOADS_BETWEEN_OFFERS, self.ask):
            return False
        return since >= self.ask or member.error > (1 + self.gap) * self._median_error

    # Review: splits.

    def act(self, view: ServerView) -> Iterable[Absorb]:
        """Review the clusters that are due: close empty ones, start new ones, merge the closest."""
        yield from self._merged_pair(view)
        due = [name for name, of in self._clusters.items() if of.merges >= self.every]
        if not due:
            return
        known = [m.error for m in self._members.values() if m.error >= 0]
        self._median_error = median(known) if known else math.inf
        self._drop_lost_seeds(view)
        here = self._devices_by_lineage(view)
        for name in [n for n in view.store.lineages if self._is_deserted(n, here.get(n, []))]:
            # Its parent may have been absorbed, even by it; so may the main lineage.
            backs = (view.store.resolve(n) for n in (self._clusters[name].parent, MAIN))
            back = next((n for n in backs if n != name), None)
            if back is not None:
                why = "no device joined its seed device" if here.get(name) else "it has no devices"
                yield Absorb(back, name, view.store.head_params(back), why)
        here = self._devices_by_lineage(view)
        for name in due:
            if name in view.store:
                self._clusters[name].merges = 0
                present = [d for d in here.get(name, []) if _is_present(d, view)]
                self._split_if_needed(name, self._clusters[name], present, len(here))
        if self._merging is None:
            open_ones = [n for n in view.store.lineages if n in here and self._clusters[n].open]
            distances = ClusterDistances(self._members, here, view)
            self._merging = distances.pair_to_merge(open_ones, self.max_clusters, self.need)

    def _drop_lost_seeds(self, view: ServerView) -> None:
        """Remove planned clusters whose seed device is no longer present."""
        for device in [d for d in self._seeds if not _is_present(d, view)]:
            del self._clusters[self._seeds.pop(device)]

    def _is_deserted(self, name: str, here: Sequence[int]) -> bool:
        """Whether it has no devices, or only its seed device after 2 * SEED_UPLOADS uploads."""
        cluster = self._clusters[name]
        if name == MAIN or len(here) > 1:
            return False
        if not here or cluster.seed_device not in self._members:
            return not here
        return self._seed_uploads(cluster) >= 2 * SEED_UPLOADS

    def _split_if_needed(
        self, name: str, cluster: ClusterState, here: Sequence[int], inhabited: int
    ) -> None:
        """Plan a new cluster, seeded by the device with the largest error, if a split is due."""
        known = sorted((m.error, d) for d in here if (m := self._members[d]).error >= 0)
        if len(known) < MIN_MEMBERS:
            return
        middle = median(error for error, _ in known)
        cluster.stuck = 0 if middle < IMPROVEMENT * cluster.best else cluster.stuck + 1
        cluster.best = min(cluster.best, middle)
        if cluster.resting:
            cluster.resting -= 1
            return
        device = known[-1][1]
        fifth = known[-quota(WORST_SHARE, len(known))][0]
        outliers = fifth > max((1 + self.gap) * middle, self.need)
        if not outliers and (middle < self.need or cluster.stuck < STUCK_AFTER):
            return
        if inhabited + len(self._seeds) >= self.max_clusters:
            return
        self._named += 1
        child = self._new_name()
        self._seeds[device] = child
        self._clusters[child] = ClusterState(
            seed_device=device,
            seeded_at=self._members[device].uploads,
            parent=name,
            fresh=self.partial,
            open=False,
        )
        cluster.resting, cluster.rest = cluster.rest, min(MAX_REST, 2 * cluster.rest)

    def _devices_by_lineage(self, view: ServerView) -> DevicesByLineage:
        """The devices of each lineage that has any."""
        found: dict[str, list[int]] = {}
        for device in self._members:
            found.setdefault(view.lineage_of(device), []).append(device)
        return found

    # Review: merges.

    def _merged_pair(self, view: ServerView) -> Iterable[Absorb]:
        """Algorithm 1, once a device's delta has given the direction."""
        if self._merging is None or self._direction is None:
            return
        (main, auxiliary), direction = self._merging, self._direction
        self._merging = self._direction = None
        if main in view.store and auxiliary in view.store:
            ours, theirs = view.store.head_params(main), view.store.head_params(auxiliary)
            yield Absorb(
                main, auxiliary, merged_params(ours, theirs, direction), "the two closest clusters"
            )

    def on_fork(self, parent: str, child: str) -> None:
        self._clusters.setdefault(child, ClusterState())

    def on_absorb(self, into: str, gone: str) -> None:
        self._clusters.pop(gone, None)
        cluster = self._clusters.setdefault(into, ClusterState())
        cluster.best, cluster.stuck = math.inf, 0
        if self._merging is not None and gone in self._merging:
            self._merging = self._direction = None


def _whole_delta(contribution: Contribution, view: ServerView) -> Tensor:
    """The delta in the coordinates of the whole model, 0 where nothing was trained."""
    if contribution.task.submodel is None:
        return contribution.delta
    whole = torch.zeros_like(view.store.head_params(contribution.lineage))
    whole[covered(contribution.task.submodel)] = contribution.delta
    return whole


def _is_present(device: int, view: ServerView) -> bool:
    return device in view.working or device in view.idle

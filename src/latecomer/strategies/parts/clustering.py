"""Clusters of devices as lineages: who is where, who founds a new one, which two become one.

Li et al. 2024 (EchoPFL), section 4. Distances and label frequencies cannot tell two worlds whose
labels are permuted, so ours beside it: a device that is badly served is given all centres and takes
the one with the least loss, and a new cluster begins with the model of its founder.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, TrainSpec
from latecomer.core.strategy import Absorb, Assignment, ServerView
from latecomer.core.submodel import covered, take
from latecomer.strategies.parts.cluster_distance import Pairing
from latecomer.strategies.parts.cluster_merge import united
from latecomer.strategies.parts.cluster_state import (
    Cluster,
    Homes,
    Member,
    finite,
    is_distribution,
    numbers,
    per_class,
)
from latecomer.strategies.parts.quota import quota

Judge = Literal["feedback", "error"]

WORST = 0.2  # the share of a cluster that may be called badly served
SMALLEST = 4  # members: with fewer a cluster is not divided
PATIENCE = 2  # refinements without a better judgement before a cluster is given up on
BETTER = 0.9  # of the best judgement so far: what counts as better
LONGEST_REST = 64  # refinements
TRIAL = 4  # uploads after which a founder must have found company
ASKED_AGAIN = 2  # uploads of a device between two questions where it belongs
LASTING = 3  # judgements in a row that must be bad
MOST_SWAY = 0.25  # p (1 - p)
WORSE = 1.5  # times the best judgement so far: the world has changed, and is learnt anew


class Clustering:
    """Route: an upload goes to the nearest centre; every `every` merges a cluster is refined.

    The first `count` uploads seed the clusters. A device leaves its cluster by itself only for a
    centre that is nearer by `margin`. When it is badly served, by `gap` times more than the median
    device, and at every `ask`-th of its uploads, it gets all centres to choose from.

    A cluster is divided if the worst fifth of its members is worse off than its median by `gap`
    times, or if its median stays above `need`: the worst one founds a new cluster, and all who are
    badly served are asked. A founder who stays alone goes back. Above `most`, two are united.

    Ours, for a fleet whose data may well be served by one model: with `turns` a cluster is looked
    at after so many uploads of each member, only one that no longer learns is divided, only those
    whom it serves badly are asked, and those who carry a part of the model have no say. Devices
    judge in every `listen`-th task.
    """

    broadcasts = False

    def __init__(
        self,
        count: int = 2,
        most: int = 4,
        every: int = 20,
        margin: float = 0.8,
        gap: float = 1.0,
        need: float = 0.2,
        judge: Judge = "error",
        ask: int = 10,
        partial: bool = True,
        turns: float = 0.0,
        listen: int = 1,
    ) -> None:
        self.count, self.most, self.every, self.margin = count, most, every, margin
        self.gap, self.need, self.judge, self.ask = gap, need, judge, ask
        self.partial, self.turns, self.listen = partial, turns, listen
        self.seeding = -1  # the task whose upload is a new centre as it is
        self._named = 0  # clusters that have been given a name
        self._members: dict[int, Member] = {}
        self._clusters: dict[str, Cluster] = {}
        self._founders: dict[int, str] = {}  # device -> the cluster that its next upload begins
        self._uniting: tuple[str, str] | None = None  # main and auxiliary, until a direction comes
        self._direction: Tensor | None = None
        self._usual = math.inf  # the median judgement of all

    # Route: who is where.

    def __call__(self, contribution: Contribution, view: ServerView) -> str:
        device = contribution.task.device
        first = device not in self._members
        self._learn(self._members.setdefault(device, Member()), contribution)
        lineage = self._place(contribution, first, view)
        self._clusters.setdefault(lineage, Cluster()).merges += 1
        self._open_if_ready(lineage)
        if self._uniting and self._direction is None and contribution.lineage == self._uniting[0]:
            self._direction = _whole_delta(contribution, view)
        return lineage

    def _learn(self, member: Member, contribution: Contribution) -> None:
        metrics = contribution.update.metrics
        member.uploads += 1
        if self.listen > 1 and self.judge not in metrics:
            return  # it was not asked
        member.judgement = float(metrics.get(self.judge, math.nan))
        if self.turns:
            member.judgement = self._lasting(member, contribution)
        soft, share, sway = (per_class(metrics, name) for name in ("soft", "share", "sway"))
        tells = is_distribution(share) and len(sway) == len(share) == len(soft)
        tells = tells and min(sway) >= 0 and max(sway) <= MOST_SWAY
        member.soft = _vector(soft) if is_distribution(soft) else None
        member.share, member.sway = (_vector(share), _vector(sway)) if tells else (None, None)
        if contribution.task.id == member.question:
            losses = ((name, metrics.get(f"loss_{i}")) for i, name in enumerate(member.offered))
            member.fits = {n: float(loss) for n, loss in losses if loss is not None and loss >= 0}
            member.answers = bool(member.fits)

    def _lasting(self, member: Member, contribution: Contribution) -> float:
        """The best of its last judgements: who was ill served once may only have been early."""
        if contribution.task.submodel is not None:
            return math.nan
        member.recent = [*member.recent, member.judgement][-LASTING:]
        return min(member.recent) if len(member.recent) == LASTING else math.nan

    def _place(self, contribution: Contribution, first: bool, view: ServerView) -> str:
        device, own = contribution.task.device, contribution.lineage
        if self._named < self.count:
            self._named += 1
            if self.count > 1:
                self.seeding = contribution.task.id
            return own if self._named == 1 else self._new_name()
        if device in self._founders:
            self.seeding = contribution.task.id
            return self._founders.pop(device)
        if len(view.store.lineages) == 1:
            return own
        distances = self.distances(contribution, view)
        nearest = min(distances, key=distances.__getitem__)
        stays = not first and distances[nearest] > self.margin * distances[own]
        return own if stays else nearest

    def distances(self, contribution: Contribution, view: ServerView) -> dict[str, float]:
        """L1 from the trained model to every centre, on the coordinates it covers. Eq. 1."""
        model, submodel = contribution.base + contribution.delta, contribution.task.submodel
        names = view.store.lineages
        centres = [take(view.store.head_params(name), submodel) for name in names]
        # All at once: this is on every update's way.
        found = torch.stack(centres).sub_(model).abs_().sum(1).tolist()
        return dict(zip(names, found, strict=True))

    def _open_if_ready(self, name: str) -> None:
        """A new cluster has been trained by its founder for a while: all who may join are asked."""
        cluster = self._clusters[name]
        if cluster.open or self._members[cluster.founder].uploads - cluster.founded < TRIAL:
            return
        cluster.open, cluster.fresh = True, False
        for member in self._members.values():
            if member.judgement > self.need:
                member.asked = -self.ask

    def _new_name(self) -> str:
        return f"cluster-{self._named - 1}"

    # Dispatch: which model a device gets.

    def assignment(self, device: int, task: int, view: ServerView) -> Assignment:
        """The device's next task, of that id; with all centres if it is asked where it belongs."""
        home, member = view.home(device), self._members.get(device)
        spec = self._spec(home, member, view)
        if member is None or device in self._founders or not self._doubtful(member, view):
            return Assignment(device, home, spec)
        others = tuple(n for n in view.store.lineages if n != home and self._clusters[n].open)
        if not others:
            return Assignment(device, home, spec)
        member.asked, member.question = member.uploads, task
        member.offered = (home, *others)
        if self.listen > 1:
            spec = replace(spec or view.spec, feedback=True)
        return Assignment(device, home, spec, others)

    def _spec(self, home: str, member: Member | None, view: ServerView) -> TrainSpec | None:
        """What is asked of a device beside the usual; None if it is that."""
        fresh = self._clusters.get(home, Cluster()).fresh
        judges = self.listen > 1 and (member is None or member.uploads % self.listen == 0)
        if not fresh and not judges:
            return None
        spec = replace(view.spec, last_layer_only=True) if fresh else view.spec
        return replace(spec, feedback=True) if judges else spec

    def _doubtful(self, member: Member, view: ServerView) -> bool:
        since = member.uploads - member.asked
        if not self.ask or not member.answers or len(view.store.lineages) == 1:
            return False
        if member.question in view.open_tasks:
            return False  # its answer is under way
        if since < min(ASKED_AGAIN, self.ask):
            return False
        if self.turns:
            return member.judgement > self.need
        return since >= self.ask or member.judgement > (1 + self.gap) * self._usual

    # Refinement: expansion.

    def refine(self, view: ServerView) -> Iterable[Absorb]:
        """Found what is missing; unite what there is too much of."""
        yield from self._united(view)
        due = [name for name in self._clusters if self._is_due(name, view)]
        if not due:
            return
        known = [m.judgement for m in self._members.values() if m.judgement >= 0]
        self._usual = median(known) if known else math.inf
        self._forget_lost_founders(view)
        here = self._members_by_home(view)
        for name in [n for n in view.store.lineages if self._is_deserted(n, here.get(n, []))]:
            # Its parent may be gone, even into it; so may the main one.
            backs = (view.store.resolve(n) for n in (self._clusters[name].parent, MAIN))
            back = next((n for n in backs if n != name), None)
            if back is not None:
                why = "nobody joined its founder" if here.get(name) else "nobody is left"
                yield Absorb(back, name, view.store.head_params(back), why)
        here = self._members_by_home(view)
        for name in due:
            if name in view.store:
                self._clusters[name].merges = 0
                present = [d for d in here.get(name, []) if _is_present(d, view)]
                self._divide(name, self._clusters[name], present, len(here))
        if self._uniting is None:
            open_ones = [n for n in view.store.lineages if n in here and self._clusters[n].open]
            pairing = Pairing(self._members, here, view)
            self._uniting = pairing.to_unite(open_ones, self.most, self.need)

    def _is_due(self, name: str, view: ServerView) -> bool:
        merges = self._clusters[name].merges
        if not self.turns or merges < self.every:
            return merges >= self.every
        here = sum(view.home(device) == name for device in self._members)
        return merges >= self.turns * here

    def _forget_lost_founders(self, view: ServerView) -> None:
        """One who is gone may never upload again: its place is for others."""
        for device in [d for d in self._founders if not _is_present(d, view)]:
            del self._clusters[self._founders.pop(device)]

    def _is_deserted(self, name: str, here: Sequence[int]) -> bool:
        """Whether nobody is left, or nobody has followed the founder, though all were asked."""
        cluster = self._clusters[name]
        if name == MAIN or len(here) > 1:
            return False
        if not here or cluster.founder not in self._members:
            return not here
        return self._members[cluster.founder].uploads - cluster.founded >= 2 * TRIAL

    def _divide(self, name: str, cluster: Cluster, here: Sequence[int], inhabited: int) -> None:
        known = sorted((m.judgement, d) for d in here if (m := self._members[d]).judgement >= 0)
        if len(known) < SMALLEST:
            return
        middle = median(judgement for judgement, _ in known)
        if self.turns and middle > WORSE * max(cluster.best, 0.5 * self.need):
            cluster.best = math.inf
        cluster.stuck = 0 if middle < BETTER * cluster.best else cluster.stuck + 1
        cluster.best = min(cluster.best, middle)
        if self.turns and cluster.stuck < PATIENCE:
            return
        if cluster.resting:
            cluster.resting -= 1
            return
        device = known[-1][1]
        fifth = known[-quota(WORST, len(known))][0]
        outliers = fifth > max((1 + self.gap) * middle, self.need)
        if not outliers and (middle < self.need or cluster.stuck < PATIENCE):
            return
        if inhabited + len(self._founders) >= self.most:
            return
        self._named += 1
        child = self._new_name()
        self._founders[device] = child
        self._clusters[child] = Cluster(
            founder=device,
            founded=self._members[device].uploads,
            parent=name,
            fresh=self.partial,
            open=False,
        )
        cluster.resting, cluster.rest = cluster.rest, min(LONGEST_REST, 2 * cluster.rest)

    def _members_by_home(self, view: ServerView) -> Homes:
        """Who uses each lineage; those that nobody uses are left out."""
        found: dict[str, list[int]] = {}
        for device in self._members:
            found.setdefault(view.home(device), []).append(device)
        return found

    # Refinement: merging.

    def _united(self, view: ServerView) -> Iterable[Absorb]:
        """Algorithm 1, once a device has told where its data lead the main model."""
        if self._uniting is None or self._direction is None:
            return
        (main, auxiliary), direction = self._uniting, self._direction
        self._uniting = self._direction = None
        if main in view.store and auxiliary in view.store:
            ours, theirs = view.store.head_params(main), view.store.head_params(auxiliary)
            yield Absorb(main, auxiliary, united(ours, theirs, direction), "the two closest")

    # Lineages come and go.

    def on_fork(self, parent: str, child: str) -> None:
        self._clusters.setdefault(child, Cluster())

    def on_absorb(self, into: str, gone: str) -> None:
        self._clusters.pop(gone, None)
        cluster = self._clusters.setdefault(into, Cluster())
        cluster.best, cluster.stuck = math.inf, 0
        if self._uniting is not None and gone in self._uniting:
            self._uniting = self._direction = None

    def expected(self, devices: Iterable[int], classes: int) -> Tensor | None:
        """The mean soft label on the data of these devices, as far as they have told theirs."""
        softs = [m.soft for d in devices if (m := self._members.get(d))]
        told = [soft for soft in softs if soft is not None and len(soft) == classes]
        return torch.stack(told).mean(0) if told else None

    def told(self, devices: Iterable[int], classes: int) -> dict[int, tuple[Tensor, ...]]:
        """The soft labels, shares and sways of the classes, of these devices that tell them."""
        found: dict[int, tuple[Tensor, ...]] = {}
        for device in devices:
            member = self._members.get(device)
            if member is None or member.soft is None or len(member.soft) != classes:
                continue
            if member.share is not None and member.sway is not None:
                found[device] = (member.soft, member.share, member.sway)
        return found

    def errors(self, devices: Iterable[int]) -> dict[int, float]:
        """The share of errors that each of these devices has last told."""
        recent = {d: m.recent for d in devices if (m := self._members.get(d))}
        return {d: last[-1] for d, last in recent.items() if last and 0 <= last[-1] <= 1}

    def state(self) -> dict[str, Any]:
        members = {d: finite(astuple(m)) for d, m in self._members.items()}
        clusters = {name: finite(astuple(c)) for name, c in self._clusters.items()}
        return {
            "named": self._named,
            "members": members,
            "clusters": clusters,
            "founders": dict(self._founders),
            "uniting": self._uniting,
            "direction": self._direction,
            "usual": finite([self._usual])[0],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._named = state["named"]
        self._members = {d: Member(*numbers(f)) for d, f in state["members"].items()}
        self._clusters = {n: Cluster(*numbers(f)) for n, f in state["clusters"].items()}
        self._founders = dict(state["founders"])
        self._uniting, self._direction = state["uniting"], state["direction"]
        self._usual = numbers([state["usual"]])[0]


def _vector(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _whole_delta(contribution: Contribution, view: ServerView) -> Tensor:
    """The delta in the coordinates of the whole model, 0 where nothing was trained."""
    if contribution.task.submodel is None:
        return contribution.delta
    whole = torch.zeros_like(view.store.head_params(contribution.lineage))
    whole[covered(contribution.task.submodel)] = contribution.delta
    return whole


def _is_present(device: int, view: ServerView) -> bool:
    return device in view.working or device in view.idle

"""Clusters of devices as lineages: who is where, who founds a new one, which two become one.

Li et al. 2024 (EchoPFL), section 4. Distances and label frequencies cannot tell two worlds whose
labels are permuted, so ours beside it: a device that is badly served is given all centres and takes
the one with the least loss, and a new cluster begins with the model of its founder.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution
from latecomer.core.strategy import Absorb, Assignment, ServerView
from latecomer.core.submodel import covered, take
from latecomer.strategies.quota import quota
from latecomer.strategies.uniting import symmetric_kl, united

Judge = Literal["feedback", "error"]
Homes = Mapping[str, Sequence[int]]  # lineage -> the devices that use it

WORST = 0.2  # the share of a cluster that may be called badly served
SMALLEST = 4  # members: with fewer a cluster is not divided
PATIENCE = 2  # refinements without a better judgement before a cluster is given up on
BETTER = 0.9  # of the best judgement so far: what counts as better
LONGEST_REST = 64  # refinements
TRIAL = 4  # uploads after which a founder must have found company
ALIKE = 0.25  # of the loss of mere chance: two models that differ by less are called alike
WORTHLESS = 4.0  # times the loss of mere chance: none counts for more, or one could speak for all
ASKED_AGAIN = 2  # uploads of a device between two questions where it belongs


@dataclass(slots=True)
class Member:
    """What is known of a device: its last judgement and mean soft label, and its uploads."""

    judgement: float = math.nan
    soft: Tensor | None = None
    uploads: int = 0
    asked: int = 0  # the upload at which it was last asked where it belongs
    question: int = -1  # the task it was asked with
    offered: tuple[str, ...] = ()  # what it has to choose from
    answers: bool = True  # whether it tells its loss when it is asked; a private one does not
    fits: dict[str, float] = field(default_factory=dict)  # its loss on each of them


@dataclass(slots=True)
class Cluster:
    """What is known of a lineage."""

    merges: int = 0  # since it was last refined
    best: float = math.inf  # the lowest median judgement so far
    stuck: int = 0  # refinements since
    resting: int = 0  # refinements before it may be divided
    rest: int = 1  # how long the next rest is
    founder: int = -1  # who began it
    founded: int = 0  # and after how many uploads
    parent: str = MAIN
    fresh: bool = False  # only the output layer is trained
    open: bool = True  # whether others are asked to join it


class Branches:
    """Route: an upload goes to the nearest centre; every `every` merges a cluster is refined.

    The first `count` uploads seed the clusters. A device leaves its cluster by itself only for a
    centre that is nearer by `margin`. When it is badly served, by `gap` times more than the median
    device, and at every `ask`-th of its uploads, it gets all centres to choose from.

    A cluster is divided if the worst fifth of its members is worse off than its median by `gap`
    times, or if its median stays above `need`: the worst one founds a new cluster, and all who are
    badly served are asked. A founder who stays alone goes back. Above `most`, two are united.
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
    ) -> None:
        self.count, self.most, self.every, self.margin = count, most, every, margin
        self.gap, self.need, self.judge, self.ask = gap, need, judge, ask
        self.partial = partial
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
        member.judgement = float(metrics.get(self.judge, math.nan))
        soft = [metrics[f"soft_{j}"] for j in range(len(metrics)) if f"soft_{j}" in metrics]
        member.soft = torch.tensor(soft, dtype=torch.float64) if _is_distribution(soft) else None
        if contribution.task.id == member.question:
            losses = ((name, metrics.get(f"loss_{i}")) for i, name in enumerate(member.offered))
            member.fits = {n: float(loss) for n, loss in losses if loss is not None and loss >= 0}
            member.answers = bool(member.fits)

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
        fresh = self._clusters.get(home, Cluster()).fresh
        spec = replace(view.spec, last_layer_only=True) if fresh else None
        if member is None or device in self._founders or not self._doubtful(member, view):
            return Assignment(device, home, spec)
        others = tuple(n for n in view.store.lineages if n != home and self._clusters[n].open)
        if not others:
            return Assignment(device, home, spec)
        member.asked, member.question = member.uploads, task
        member.offered = (home, *others)
        return Assignment(device, home, spec, others)

    def _doubtful(self, member: Member, view: ServerView) -> bool:
        since = member.uploads - member.asked
        if not self.ask or not member.answers or len(view.store.lineages) == 1:
            return False
        if member.question in view.open_tasks:
            return False  # its answer is under way
        if since < min(ASKED_AGAIN, self.ask):
            return False
        return since >= self.ask or member.judgement > (1 + self.gap) * self._usual

    # Refinement: expansion.

    def refine(self, view: ServerView) -> Iterable[Absorb]:
        """Found what is missing; unite what there is too much of."""
        yield from self._united(view)
        due = [name for name, cluster in self._clusters.items() if cluster.merges >= self.every]
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
                yield Absorb(back, name, view.store.head_params(back))
        here = self._members_by_home(view)
        for name in due:
            if name in view.store:
                self._clusters[name].merges = 0
                present = [d for d in here.get(name, []) if _is_present(d, view)]
                self._divide(name, self._clusters[name], present, len(here))
        if self._uniting is None:
            self._uniting = self._to_unite(here, view)

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
        cluster.stuck = 0 if middle < BETTER * cluster.best else cluster.stuck + 1
        cluster.best = min(cluster.best, middle)
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

    def _to_unite(self, here: Homes, view: ServerView) -> tuple[str, str] | None:
        """The closest pair, the larger cluster first, if it is alike or there are too many."""
        names = [n for n in view.store.lineages if n in here and self._clusters[n].open]
        names.sort(key=lambda name: -len(here[name]))
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        if not pairs:
            return None
        larger, smaller = min(pairs, key=lambda pair: self._apart(pair[0], pair[1], here, view))
        # What the few would lose counts: the many have made their model better than the few could.
        lost = self._extra_loss(smaller, larger, here)
        alike = lost is not None and lost < ALIKE and self._serves(here[larger])
        return (larger, smaller) if alike or len(names) > self.most else None

    def _apart(
        self, larger: str, smaller: str, here: Homes, view: ServerView
    ) -> tuple[float, float]:
        """By what the smaller one's members would lose; where nobody knows, by KL of soft labels.

        The last resort is the distance of the models.
        """
        lost = self._extra_loss(smaller, larger, here)
        if lost is not None:
            return lost, 0.0
        one, two = (self._mean_soft(here[name]) for name in (larger, smaller))
        if one is not None and two is not None:
            return math.inf, symmetric_kl(one, two)
        first, second = view.store.head_params(larger), view.store.head_params(smaller)
        return math.inf, 1e9 + torch.dist(first, second, p=1).item()

    def _extra_loss(self, home: str, other: str, here: Homes) -> float | None:
        """How much worse off the devices of `home` would be elsewhere; 1 is the loss of chance."""
        known = [self._members[device] for device in here[home]]
        most = WORTHLESS * self._chance
        extra = [
            min(m.fits[other], most) - min(m.fits[home], most)
            for m in known
            if {home, other} <= m.fits.keys()
        ]
        return sum(extra) / len(extra) / self._chance if extra else None

    def _serves(self, devices: Sequence[int]) -> bool:
        """Whether a cluster is good to most of its members."""
        known = [j for d in devices if (j := self._members[d].judgement) >= 0]
        return bool(known) and median(known) < self.need

    @property
    def _classes(self) -> int:
        """What most devices take for the number of classes; 0 if none has told."""
        told = Counter(len(m.soft) for m in self._members.values() if m.soft is not None)
        return told.most_common(1)[0][0] if told else 0

    @property
    def _chance(self) -> float:
        """The loss of one who knows nothing."""
        return math.log(self._classes or math.e)

    def _mean_soft(self, devices: Sequence[int]) -> Tensor | None:
        classes, all_told = self._classes, (self._members[d].soft for d in devices)
        known = [soft for soft in all_told if soft is not None and len(soft) == classes]
        return torch.stack(known).mean(0) if known else None

    def _united(self, view: ServerView) -> Iterable[Absorb]:
        """Algorithm 1, once a device has told where its data lead the main model."""
        if self._uniting is None or self._direction is None:
            return
        (main, auxiliary), direction = self._uniting, self._direction
        self._uniting = self._direction = None
        if main in view.store and auxiliary in view.store:
            ours, theirs = view.store.head_params(main), view.store.head_params(auxiliary)
            yield Absorb(main, auxiliary, united(ours, theirs, direction))

    # Lineages come and go.

    def on_fork(self, parent: str, child: str) -> None:
        self._clusters.setdefault(child, Cluster())

    def on_absorb(self, into: str, gone: str) -> None:
        self._clusters.pop(gone, None)
        cluster = self._clusters.setdefault(into, Cluster())
        cluster.best, cluster.stuck = math.inf, 0
        if self._uniting is not None and gone in self._uniting:
            self._uniting = self._direction = None

    def state(self) -> dict[str, Any]:
        members = {d: _finite(astuple(m)) for d, m in self._members.items()}
        clusters = {name: _finite(astuple(c)) for name, c in self._clusters.items()}
        return {
            "named": self._named,
            "members": members,
            "clusters": clusters,
            "founders": dict(self._founders),
            "uniting": self._uniting,
            "direction": self._direction,
            "usual": _finite([self._usual])[0],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._named = state["named"]
        self._members = {d: Member(*_numbers(f)) for d, f in state["members"].items()}
        self._clusters = {n: Cluster(*_numbers(f)) for n, f in state["clusters"].items()}
        self._founders = dict(state["founders"])
        self._uniting, self._direction = state["uniting"], state["direction"]
        self._usual = _numbers([state["usual"]])[0]


class FromBranches:
    """Dispatch: every waiting device gets the head of its branch at once."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        return [
            self.branches.assignment(device, view.tasks_given + place, view)
            for place, device in enumerate(view.idle)
        ]


def _whole_delta(contribution: Contribution, view: ServerView) -> Tensor:
    """The delta in the coordinates of the whole model, 0 where nothing was trained."""
    if contribution.task.submodel is None:
        return contribution.delta
    whole = torch.zeros_like(view.store.head_params(contribution.lineage))
    whole[covered(contribution.task.submodel)] = contribution.delta
    return whole


def _is_present(device: int, view: ServerView) -> bool:
    return device in view.working or device in view.idle


def _is_distribution(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) >= 0 and abs(sum(values) - 1) < 1e-3


def _finite(values: Sequence[Any]) -> list[Any]:
    """The same with words for numbers that JSON cannot say."""
    return [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]


def _numbers(values: Sequence[Any]) -> list[Any]:
    return [float(v) if v in ("nan", "inf", "-inf") else v for v in values]

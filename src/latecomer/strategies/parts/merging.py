"""Parts for the *merge* slot that commit several contributions together: buffers and epochs.

(`core.strategy.Mix` commits every contribution on arrival.)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from latecomer.core.messages import MAIN, Contribution, TimerExpired
from latecomer.core.params import Layout, chunks
from latecomer.core.strategy import Commit, Drop, ServerView, Stateful
from latecomer.core.submodel import covered, take
from latecomer.strategies.parts.quota import quota

# (lineage, devices with an update in this commit, view) -> weighed surrogate updates
Surrogates = Callable[[str, Iterable[int], ServerView], Sequence[Contribution]]
# (lineage, head, contributions, step) -> the new head
Combine = Callable[[str, Tensor, Sequence[Contribution], float], Tensor]


def buffers_from(view: ServerView) -> int | None:
    """Where the network's buffers (BatchNorm) begin in the parameter vector; None without any."""
    layout = getattr(view.network(None), "layout", None)
    return layout.trained if isinstance(layout, Layout) and layout.buffers else None


def moved(head: Tensor, contributions: Sequence[Contribution], mean: bool, step: float) -> Tensor:
    """head + step * (sum of weight_i delta_i) / (sum of weights if `mean`, else their number).

    With sub-models both sums run per coordinate over the contributions that cover it; a coordinate
    that none covers keeps its value bit for bit.
    """
    submodel = contributions[0].task.submodel
    if all(c.task.submodel is submodel for c in contributions):
        if submodel is None:
            return _moved_same_coordinates(head, contributions, mean, step)
        result = head.clone()
        part = _moved_same_coordinates(submodel.take(head), contributions, mean, step)
        result[submodel.index] = part
        return result
    total, share_of = torch.zeros_like(head), torch.zeros_like(head)
    for c in contributions:
        index = covered(c.task.submodel)
        total[index] += c.weight * c.delta
        share_of[index] += c.weight if mean else 1.0
    return torch.where(share_of > 0, head + step * total / share_of, head)


def _moved_same_coordinates(
    head: Tensor, contributions: Sequence[Contribution], mean: bool, step: float
) -> Tensor:
    """As `moved`, for contributions that all cover the same coordinates."""
    share = math.fsum(c.weight for c in contributions) if mean else len(contributions)
    if not share:
        return head.clone()
    result = torch.empty_like(head)
    for part in chunks(head.numel()):
        total = result[part].zero_()
        for c in contributions:
            total.add_(c.delta[part], alpha=c.weight)
        torch.add(head[part], total, alpha=step / share, out=total)
    return result


def relative_to(head: Tensor, contribution: Contribution) -> Contribution:
    """The same model with `head` as base; the delta keeps its bits if `head` is its base."""
    head = take(head, contribution.task.submodel)
    return contribution.rebase(head, (contribution.base - head) + contribution.delta)


def averaged(mean: bool) -> Combine:
    """Combine: `moved` with this `mean`."""

    def combine(
        lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        return moved(head, contributions, mean, step)

    return combine


def trained_by(contributions: Sequence[Contribution], head: Tensor) -> Tensor | None:
    """A mask of the coordinates that at least one contribution covers; None: all are covered."""
    trained = torch.zeros_like(head, dtype=torch.bool)
    for contribution in contributions:
        if contribution.task.submodel is None:
            return None
        trained[contribution.task.submodel.index] = True
    return trained


class Buffer(Stateful):
    """Merge: commit whenever a lineage has received `size` contributions.

    `combine` computes the new head; by default head + step * (sum of weight_i delta_i) / size.
    """

    kept: ClassVar[tuple[str, ...]] = ("_gathered",)

    def __init__(self, size: int, step: float = 1.0, combine: Combine | None = None) -> None:
        self.size, self.step = size, step
        self.combine = combine or averaged(mean=False)
        self._gathered: dict[str, list[Contribution]] = {}

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        gathered = self._gathered.setdefault(contribution.lineage, [])
        gathered.append(contribution)
        if len(gathered) < self.size:
            return None
        del self._gathered[contribution.lineage]
        head = view.store.head_params(contribution.lineage)
        params = self.combine(contribution.lineage, head, gathered, self.step)
        return Commit(contribution.lineage, params, len(gathered))

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def on_absorb(self, into: str, gone: str) -> None:
        self._gathered.setdefault(into, []).extend(self._gathered.pop(gone, []))


class Epochs(Stateful):
    """Merge: commit at the end of an epoch, when `quorum` of the devices sent its model are back.

    Lost tasks no longer count. All contributions received during the epoch are averaged by weight.
    Late updates of earlier epochs are averaged into the epoch of their arrival, or dropped without
    `keep_late`. The timer `TimerExpired("epoch", version)` ends an epoch with the contributions
    received so far. `surrogates` are added for absent devices. `combine` replaces the average.
    """

    kept = ("_gathered", "_on_time", "_expired")

    def __init__(
        self,
        quorum: float = 1.0,
        keep_late: bool = True,
        step: float = 1.0,
        surrogates: Surrogates | None = None,
        combine: Combine | None = None,
    ) -> None:
        self.quorum, self.keep_late, self.step = quorum, keep_late, step
        self.surrogates = surrogates
        self.combine = combine or averaged(mean=True)
        self._gathered: list[Contribution] = []
        self._on_time = 0  # contributions based on the head
        self._expired = -1  # the version whose timer has expired

    def add(self, contribution: Contribution, view: ServerView) -> Drop | None:
        on_time = contribution.task.version == view.store.head()
        if not on_time and not self.keep_late:
            return Drop("its round is closed")
        self._on_time += on_time
        self._gathered.append(contribution)
        return None

    def settle(self, view: ServerView) -> Iterable[Commit]:
        version = view.store.head()
        expected = self._on_time + view.store.pins(version)
        enough = self._on_time >= quota(self.quorum, expected)
        if not self._gathered or not (enough or self._expired == version):
            return ()
        gathered, others = self._gathered, list[Contribution]()
        if self.surrogates is not None:
            present = {contribution.task.device for contribution in gathered}
            others = list(self.surrogates(MAIN, present, view))
        params = self.combine(MAIN, view.store.head_params(), [*gathered, *others], self.step)
        commit = Commit(MAIN, params, len(gathered), len(others))
        self._gathered, self._on_time = [], 0
        return (commit,)

    def on_timer(self, timer: TimerExpired, view: ServerView) -> None:
        if timer.name == "epoch":
            self._expired = timer.version

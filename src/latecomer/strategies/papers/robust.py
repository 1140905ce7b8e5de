"""Byzantine-robust aggregation rules, for a buffer and for quorum epochs.

Coordinate-wise median and trimmed mean: Yin et al., Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates, 2018 (Definitions 1 and 2). Krum and multi-Krum: Blanchard et al.,
Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, 2017 (section 4). Norm
clipping: Sun et al., Can You Really Backdoor Federated Learning?, 2019.

w <- w + server_lr * rule(weight_i * delta_i). The weights depend on staleness, which the server
measures; the number of examples, which a device could forge, is not used.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, cast

import torch
from annotated_types import Interval
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Strategy, full_weight
from latecomer.core.submodel import covered
from latecomer.errors import BadInput
from latecomer.strategies.options import CountOrOff, NotNegative
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.parts.merging import Buffer, Combine, Epochs
from latecomer.strategies.recipe import recipe

RuleName = Literal["median", "trimmed-mean", "krum", "multi-krum", "clip"]
Trim = Annotated[float, Interval(ge=0, lt=0.5)]
PAPERS = "Yin et al. 2018; Blanchard et al. 2017; Sun et al. 2019"


class Votes(NamedTuple):
    """One row of weighted deltas for each vote, 0 where the vote does not cover a coordinate.

    `present` is the mask of covered coordinates; it has one column if no vote is of a sub-model.
    """

    values: Tensor
    present: Tensor

    @property
    def counts(self) -> Tensor:
        return self.present.sum(0)


AggregationRule = Callable[[Votes], tuple[Tensor, Tensor]]  # -> delta, mask of where it holds


def votes_of(contributions: Sequence[Contribution], head: Tensor, per_device: bool) -> Votes:
    """A row for each device, the mean of its contributions, or one for each contribution."""
    voters: dict[int, list[Contribution]] = {}
    for number, c in enumerate(contributions):
        voters.setdefault(c.task.device if per_device else number, []).append(c)
    if all(c.task.submodel is None for c in contributions):
        rows = [
            torch.stack([c.weight * c.delta for c in group]).mean(0) for group in voters.values()
        ]
        return Votes(torch.stack(rows), torch.ones(len(rows), 1, dtype=torch.bool))
    values, counts = head.new_zeros(2, len(voters), head.numel())
    for row, group in enumerate(voters.values()):
        for c in group:
            index = covered(c.task.submodel)
            values[row, index] += c.weight * c.delta
            counts[row, index] += 1
    return Votes(values / counts.clamp(min=1), counts > 0)


def mean(votes: Votes) -> tuple[Tensor, Tensor]:
    """The mean over the votes that cover a coordinate."""
    return votes.values.sum(0) / votes.counts.clamp(min=1), votes.counts > 0


def median(votes: Votes) -> tuple[Tensor, Tensor]:
    """The median of each coordinate. Yin et al., Definition 1."""
    ordered, counts = _ordered(votes), votes.counts.expand(votes.values.shape[1])
    low = ordered.gather(0, ((counts - 1).clamp(min=0) // 2)[None])
    high = ordered.gather(0, (counts // 2).clamp(max=len(ordered) - 1)[None])
    return ((low + high) / 2)[0], votes.counts > 0


def trimmed_mean(trim: float) -> AggregationRule:
    """The mean of each coordinate without the `trim` largest and smallest. Yin et al., Def. 2."""

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        ordered, counts = _ordered(votes), votes.counts
        # 0.29 * 100 is slightly below 29 in floating point; the result must be 29.
        cut = (trim * counts + 1e-9).floor()
        place = torch.arange(len(ordered))[:, None]
        kept = torch.where((place >= cut) & (place < counts - cut), ordered, 0.0)
        return kept.sum(0) / (counts - 2 * cut).clamp(min=1), counts > 0

    return rule


def krum(byzantine: int, selected: int = 1) -> AggregationRule:
    """The mean of the `selected` votes with the least sum of distances to their n - f - 2 nearest.

    `selected` = 0 is multi-Krum with n - f - 2. f = `byzantine` votes are tolerated if n >= 2f + 3;
    with fewer, at least one neighbour counts. Distances are mean squares over the coordinates that
    both votes cover, so that they do not depend on the width of a sub-model; without a common
    coordinate they are infinite.
    """

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        nearest = max(1, len(votes.values) - byzantine - 2)
        others = distances(votes).sort(dim=1).values[:, 1 : nearest + 1]  # the first is itself
        best = others.sum(1).argsort(stable=True)[: selected or nearest]  # the score, section 4
        return mean(Votes(votes.values[best], votes.present[best]))

    return rule


def distances(votes: Votes) -> Tensor:
    """Mean squared distances of all pairs of votes, over the coordinates that both cover."""
    count = len(votes.values)
    found = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        both = votes.present[i] & votes.present[i + 1 :]
        squares = (votes.values[i] - votes.values[i + 1 :]).square() * both
        common = both.expand(squares.shape).sum(1)
        far = squares.sum(1, dtype=torch.float64) / common
        found[i, i + 1 :] = found[i + 1 :, i] = torch.where(common > 0, far, math.inf)
    return found


def clip(bound: float) -> AggregationRule:
    """The mean of deltas clipped to the L2 norm `bound` (0: to their median norm)."""

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(votes.values, dim=1, keepdim=True)
        limit = bound or norms.median()  # the lower one of an even number
        factor = torch.where(norms > limit, limit / norms, 1.0)  # Sun et al., 1 / max(1, norm / M)
        return mean(Votes(votes.values * factor, votes.present))

    return rule


def _ordered(votes: Votes) -> Tensor:
    """Each coordinate sorted, votes that do not cover it at the end."""
    return votes.values.masked_fill(~votes.present, math.inf).sort(dim=0).values


def robust(rule: AggregationRule, per_device: bool = True) -> Combine:
    """Combine: head + step * rule(weighted deltas), on the coordinates that the rule returns.

    Weights are factors on the deltas: they must not be numbers of examples.
    """

    def combine(
        lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        delta, covered_by_rule = rule(votes_of(contributions, head, per_device))
        return torch.where(covered_by_rule, torch.add(head, delta, alpha=step), head)

    return combine


def named_rule(name: RuleName, byzantine: int, trim: float, bound: float) -> AggregationRule:
    """The rule of that name."""
    match name:
        case "median":
            return median
        case "trimmed-mean":
            return trimmed_mean(trim)
        case "clip":
            return clip(bound)
        case _:
            return krum(byzantine, selected=1 if name == "krum" else 0)


@recipe(
    "robust-fedbuff",
    "buffer of K updates, merged by a Byzantine-robust rule",
    PAPERS,
    of=(fedbuff,),
)
def robust_fedbuff(
    plain: Strategy,
    size: int,
    rule: RuleName = "median",
    byzantine: CountOrOff = 1,
    trim: Trim = 0.2,
    bound: NotNegative = 0.0,
    votes_per: Literal["device", "update"] = "device",
) -> Strategy:
    """Options, beside those of `fedbuff`:

    rule: "median", "trimmed-mean", "krum", "multi-krum" or "clip"; "clip" where devices hold
        different classes, because the others take rare classes for outliers.
    byzantine: number of hostile devices that "krum" and "multi-krum" tolerate.
    trim: share that "trimmed-mean" removes on each side, below 0.5.
    bound: L2 norm to which "clip" clips a delta; 0: the median norm of the buffer.
    votes_per: "device" averages several updates of a device to one vote, so that a fast device
        cannot fill a buffer; "update" counts each.
    """
    if "krum" in rule and size < 2 * byzantine + 3:
        raise BadInput(f"size: {size}: must be at least 2 byzantine + 3 = {2 * byzantine + 3}")
    if rule == "trimmed-mean" and trim and trim * size + 1e-9 < 1:
        raise BadInput(f"trim: {trim}: must be 0, or at least 1 / size = {1 / size:g}")
    combine = robust(named_rule(rule, byzantine, trim, bound), per_device=votes_per == "device")
    cast(Buffer, plain.merge).combine = combine
    return replace(plain, name="robust-fedbuff")


@recipe(
    "robust-quorum", "quorum epochs, merged by a Byzantine-robust rule", PAPERS, of=(semi_async,)
)
def robust_quorum(
    plain: Strategy,
    rule: RuleName = "median",
    byzantine: CountOrOff = 1,
    trim: Trim = 0.2,
    bound: NotNegative = 0.0,
) -> Strategy:
    """Options, beside those of `semi-async`; every device has the same weight:

    rule, byzantine, trim, bound: as in `robust-fedbuff`.
    """
    cast(Epochs, plain.merge).combine = robust(named_rule(rule, byzantine, trim, bound))
    return replace(plain, name="robust-quorum", weigh=full_weight)

"""Merging that a few broken or hostile devices cannot drag away.

Coordinate-wise median and trimmed mean: Yin et al., Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates, 2018 (Definitions 1 and 2). Krum and multi-Krum: Blanchard et al.,
Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, 2017 (section 4). Clipping:
Sun et al., Can You Really Backdoor Federated Learning?, 2019.

Only what the server knows by itself has a say: a weight for staleness is a factor on the delta,
and the number of examples, which a device could invent, counts nowhere.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Strategy, full_weight
from latecomer.core.submodel import covered
from latecomer.errors import BadInput
from latecomer.strategies.options import Count, CountOrOff, NotNegative, Positive, Share
from latecomer.strategies.papers.fedasync import DecayName
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.parts.merging import Buffer, Combine, Epochs
from latecomer.strategies.parts.selecting import SelectName
from latecomer.strategies.recipe import recipe

RuleName = Literal["median", "trimmed-mean", "krum", "multi-krum", "clip"]
Trim = Annotated[float, Interval(ge=0, lt=0.5)]
PAPERS = "Yin et al. 2018; Blanchard et al. 2017; Sun et al. 2019"


class Votes(NamedTuple):
    """One row of the whole model for each voter; 0 where it is not `present`.

    `present` has one column for all coordinates if nobody carries a sub-model.
    """

    values: Tensor
    present: Tensor

    @property
    def counts(self) -> Tensor:
        return self.present.sum(0)


Rule = Callable[[Votes], tuple[Tensor, Tensor]]  # -> the delta, and where it is one


def votes_of(contributions: Sequence[Contribution], head: Tensor, per_device: bool) -> Votes:
    """A row for each device, the mean of what it sent, or one for each contribution."""
    voters: dict[int, list[Contribution]] = {}
    for number, c in enumerate(contributions):
        voters.setdefault(c.task.device if per_device else number, []).append(c)
    if all(c.task.submodel is None for c in contributions):
        rows = [torch.stack([c.weight * c.delta for c in own]).mean(0) for own in voters.values()]
        return Votes(torch.stack(rows), torch.ones(len(rows), 1, dtype=torch.bool))
    values, counts = head.new_zeros(2, len(voters), head.numel())
    for row, own in enumerate(voters.values()):
        for c in own:
            index = covered(c.task.submodel)
            values[row, index] += c.weight * c.delta
            counts[row, index] += 1
    return Votes(values / counts.clamp(min=1), counts > 0)


def mean(votes: Votes) -> tuple[Tensor, Tensor]:
    """The mean of those present."""
    return votes.values.sum(0) / votes.counts.clamp(min=1), votes.counts > 0


def median(votes: Votes) -> tuple[Tensor, Tensor]:
    """The middle one, or the mean of the two in the middle. Yin et al., Definition 1."""
    ordered, counts = _ordered(votes), votes.counts.expand(votes.values.shape[1])
    low = ordered.gather(0, ((counts - 1).clamp(min=0) // 2)[None])
    high = ordered.gather(0, (counts // 2).clamp(max=len(ordered) - 1)[None])
    return ((low + high) / 2)[0], votes.counts > 0


def trimmed_mean(trim: float) -> Rule:
    """The mean without the largest and the smallest share `trim`. Yin et al., Definition 2."""

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        ordered, counts = _ordered(votes), votes.counts
        # 0.29 * 100 is a hair below 29 in floating point, and must count as 29.
        cut = (trim * counts + 1e-9).floor()
        place = torch.arange(len(ordered))[:, None]
        kept = torch.where((place >= cut) & (place < counts - cut), ordered, 0.0)
        return kept.sum(0) / (counts - 2 * cut).clamp(min=1), counts > 0

    return rule


def krum(byzantine: int, keep: int = 1) -> Rule:
    """The mean of the `keep` voters that are nearest to their n - f - 2 nearest ones (0: so many).

    With f = `byzantine` it takes n >= 2f + 3 voters to be safe; with fewer, at least one neighbour
    counts. Distances are mean squares over the coordinates that both have trained, so that a
    narrow sub-model is not near to all for its size; without any in common they are infinite.
    """

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        nearest = max(1, len(votes.values) - byzantine - 2)
        others = distances(votes).sort(dim=1).values[:, 1 : nearest + 1]  # the first is itself
        best = others.sum(1).argsort(stable=True)[: keep or nearest]  # the score, section 4
        return mean(Votes(votes.values[best], votes.present[best]))

    return rule


def distances(votes: Votes) -> Tensor:
    """Mean squared distances of all pairs, on what both have trained; 0 to oneself."""
    count = len(votes.values)
    found = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        both = votes.present[i] & votes.present[i + 1 :]
        squares = (votes.values[i] - votes.values[i + 1 :]).square() * both
        common = both.expand(squares.shape).sum(1)
        far = squares.sum(1, dtype=torch.float64) / common
        found[i, i + 1 :] = found[i + 1 :, i] = torch.where(common > 0, far, math.inf)
    return found


def clip(bound: float) -> Rule:
    """The mean of deltas that are at most `bound` long (0: as long as the median one)."""

    def rule(votes: Votes) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(votes.values, dim=1, keepdim=True)
        limit = bound or norms.median()  # of an even number, the lower one
        factor = torch.where(norms > limit, limit / norms, 1.0)  # Sun et al., 1 / max(1, norm / M)
        return mean(Votes(votes.values * factor, votes.present))

    return rule


def _ordered(votes: Votes) -> Tensor:
    """Each coordinate sorted, those who are not present at the end."""
    return votes.values.masked_fill(~votes.present, math.inf).sort(dim=0).values


def robust(rule: Rule, per_device: bool = True) -> Combine:
    """Combine: head + step * what the rule makes of the weighted deltas.

    A coordinate moves if somebody whom the rule listens to trained it. Weights are factors on the
    deltas: they must not be numbers of examples.
    """

    def combine(
        lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        delta, heard = rule(votes_of(contributions, head, per_device))
        return torch.where(heard, torch.add(head, delta, alpha=step), head)

    return combine


def named_rule(name: RuleName, byzantine: int, trim: float, bound: float) -> Rule:
    match name:
        case "median":
            return median
        case "trimmed-mean":
            return trimmed_mean(trim)
        case "clip":
            return clip(bound)
        case _:
            return krum(byzantine, keep=1 if name == "krum" else 0)


@recipe("robust-fedbuff", "gather K updates, merge them so that outliers do not count", PAPERS)
def robust_fedbuff(
    rule: RuleName = "median",
    byzantine: CountOrOff = 1,
    trim: Trim = 0.2,
    bound: NotNegative = 0.0,
    voices: Literal["devices", "updates"] = "devices",
    size: Count = 10,
    server_lr: Positive = 1.0,
    decay: DecayName = "polynomial",
    p: NotNegative = 0.5,
    b: NotNegative = 4.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """`byzantine` for krum and multi-krum, `trim` for trimmed-mean, `bound` for clip.

    A fast device could fill a buffer alone; so several updates of one are one voice.
    """
    if "krum" in rule and size < 2 * byzantine + 3:
        raise BadInput(f"size: {size}: must be at least 2 byzantine + 3 = {2 * byzantine + 3}")
    if rule == "trimmed-mean" and trim and trim * size + 1e-9 < 1:
        raise BadInput(f"trim: {trim}: must be 0, or at least 1 / size = {1 / size:g}")
    combine = robust(named_rule(rule, byzantine, trim, bound), per_device=voices == "devices")
    plain = fedbuff(size, server_lr, decay, p, b, concurrency)
    return replace(plain, name="robust-fedbuff", merge=Buffer(size, server_lr, combine))


@recipe("robust-quorum", "quorum epochs, merged so that outliers do not count", PAPERS)
def robust_quorum(
    rule: RuleName = "median",
    byzantine: CountOrOff = 1,
    trim: Trim = 0.2,
    bound: NotNegative = 0.0,
    quorum: Share = 0.7,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
    fraction: Share = 1.0,
) -> Strategy:
    """All devices count alike, whatever number of examples they claim to have."""
    plain = semi_async(quorum, min_devices, select=select, fraction=fraction)
    combine = robust(named_rule(rule, byzantine, trim, bound))
    merge = Epochs(quorum, step=server_lr, combine=combine)
    return replace(plain, name="robust-quorum", weigh=full_weight, merge=merge)

"""Which two clusters to merge, and the merged model. Li et al. 2024 (EchoPFL), section 4.3.2.

Label frequencies cannot separate permuted labels. So, beside the paper: the distance is the extra
loss that the smaller cluster's devices would have with the larger one's model.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from latecomer.core.strategy import ServerView
from latecomer.strategies.parts.cluster_state import DevicesByLineage, MemberState

SIMILAR_LOSS = 0.25  # extra loss in units of chance's, below which two models are similar
MAX_LOSS = 4.0  # in units of chance's; larger losses are cut, so that no device dominates


class ClusterDistances:
    """Distances between clusters, from losses and mean predictions that devices reported."""

    def __init__(
        self, members: Mapping[int, MemberState], here: DevicesByLineage, view: ServerView
    ) -> None:
        self.members, self.here, self.view = members, here, view
        reported = (m.mean_prediction for m in members.values())
        sizes = Counter(len(mean) for mean in reported if mean is not None)
        # The number of classes in most reports; 0 without any.
        self.classes = sizes.most_common(1)[0][0] if sizes else 0
        self.chance = math.log(self.classes or math.e)  # loss of a uniform prediction

    def pair_to_merge(
        self, names: Sequence[str], max_clusters: int, need: float
    ) -> tuple[str, str] | None:
        """The closest pair, larger cluster first, if similar or above `max_clusters`; else None."""
        ordered = sorted(names, key=lambda name: -len(self.here[name]))
        pairs = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
        if not pairs:
            return None
        larger, smaller = min(pairs, key=lambda pair: self.apart(*pair))
        # Only the smaller cluster's loss counts: the larger one's model had more training.
        extra = self.extra_loss(smaller, larger)
        similar = extra is not None and extra < SIMILAR_LOSS and self._fits(larger, need)
        return (larger, smaller) if similar or len(names) > max_clusters else None

    def apart(self, larger: str, smaller: str) -> tuple[float, float]:
        """Sort key: the smaller one's extra loss; unknown: KL of mean predictions; else L1."""
        extra = self.extra_loss(smaller, larger)
        if extra is not None:
            return extra, 0.0
        one, two = (self._mean_prediction(self.here[name]) for name in (larger, smaller))
        if one is not None and two is not None:
            return math.inf, symmetric_kl(one, two)
        store = self.view.store
        first, second = store.head_params(larger), store.head_params(smaller)
        return math.inf, 1e9 + torch.dist(first, second, p=1).item()

    def extra_loss(self, own: str, other: str) -> float | None:
        """Mean loss of `own`'s devices with the other model minus their own, in chance's loss."""
        known = [self.members[device] for device in self.here[own]]
        limit = MAX_LOSS * self.chance
        extra = [
            min(m.losses[other], limit) - min(m.losses[own], limit)
            for m in known
            if {own, other} <= m.losses.keys()
        ]
        return sum(extra) / len(extra) / self.chance if extra else None

    def _fits(self, name: str, need: float) -> bool:
        """Whether the median error of a cluster's devices is below `need`."""
        known = [error for d in self.here[name] if (error := self.members[d].error) >= 0]
        return bool(known) and median(known) < need

    def _mean_prediction(self, devices: Sequence[int]) -> Tensor | None:
        reported = (self.members[device].mean_prediction for device in devices)
        known = [mean for mean in reported if mean is not None and len(mean) == self.classes]
        return torch.stack(known).mean(0) if known else None


def symmetric_kl(p: Tensor, q: Tensor) -> float:
    """KL(p, q) + KL(q, p) of two distributions."""
    p, q = p.clamp_min(1e-9), q.clamp_min(1e-9)
    return ((p - q) * (p.log() - q.log())).sum().item()


def merged_params(main: Tensor, auxiliary: Tensor, posterior: Tensor) -> Tensor:
    """The main model moved to the auxiliary one where the delta `posterior` agrees. Algorithm 1."""
    agreement = (auxiliary - main) * posterior  # lines 2-4
    top = agreement.max()
    if top <= 0:
        return main.clone()
    alpha: Tensor = agreement.clamp_min(0.0) / top  # line 5
    return alpha * auxiliary + (1 - alpha) * main  # line 6

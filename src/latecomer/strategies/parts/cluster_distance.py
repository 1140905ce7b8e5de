"""Which two clusters are closest. Li et al. 2024 (EchoPFL), section 4.3.2.

Label frequencies cannot tell permuted labels apart; ours beside them: what the members of the
smaller cluster would lose in the larger one.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from latecomer.core.strategy import ServerView
from latecomer.strategies.parts.cluster_merge import symmetric_kl
from latecomer.strategies.parts.cluster_state import Homes, Member

ALIKE = 0.25  # of the loss of mere chance: two models that differ by less are called alike
WORTHLESS = 4.0  # times the loss of mere chance: none counts for more, or one could speak for all


class Pairing:
    """The clusters of this moment, by who is where and what they have told."""

    def __init__(self, members: Mapping[int, Member], here: Homes, view: ServerView) -> None:
        self.members, self.here, self.view = members, here, view
        told = Counter(len(m.soft) for m in members.values() if m.soft is not None)
        # What most devices take for the number of classes; 0 if none has told.
        self.classes = told.most_common(1)[0][0] if told else 0
        self.chance = math.log(self.classes or math.e)  # the loss of one who knows nothing

    def to_unite(self, names: Sequence[str], most: int, need: float) -> tuple[str, str] | None:
        """The closest pair, the larger cluster first, if it is alike or there are too many."""
        ordered = sorted(names, key=lambda name: -len(self.here[name]))
        pairs = [(a, b) for i, a in enumerate(ordered) for b in ordered[i + 1 :]]
        if not pairs:
            return None
        larger, smaller = min(pairs, key=lambda pair: self.apart(*pair))
        # What the few would lose counts: the many have made their model better than the few could.
        lost = self.extra_loss(smaller, larger)
        alike = lost is not None and lost < ALIKE and self._serves(larger, need)
        return (larger, smaller) if alike or len(names) > most else None

    def apart(self, larger: str, smaller: str) -> tuple[float, float]:
        """By what the smaller one's members would lose; where nobody knows, by KL of soft labels.

        The last resort is the distance of the models.
        """
        lost = self.extra_loss(smaller, larger)
        if lost is not None:
            return lost, 0.0
        one, two = (self._mean_soft(self.here[name]) for name in (larger, smaller))
        if one is not None and two is not None:
            return math.inf, symmetric_kl(one, two)
        store = self.view.store
        first, second = store.head_params(larger), store.head_params(smaller)
        return math.inf, 1e9 + torch.dist(first, second, p=1).item()

    def extra_loss(self, home: str, other: str) -> float | None:
        """How much worse off the devices of `home` would be elsewhere; 1 is the loss of chance."""
        known = [self.members[device] for device in self.here[home]]
        most = WORTHLESS * self.chance
        extra = [
            min(m.fits[other], most) - min(m.fits[home], most)
            for m in known
            if {home, other} <= m.fits.keys()
        ]
        return sum(extra) / len(extra) / self.chance if extra else None

    def _serves(self, name: str, need: float) -> bool:
        """Whether a cluster is good to most of its members."""
        known = [j for d in self.here[name] if (j := self.members[d].judgement) >= 0]
        return bool(known) and median(known) < need

    def _mean_soft(self, devices: Sequence[int]) -> Tensor | None:
        told = (self.members[device].soft for device in devices)
        known = [soft for soft in told if soft is not None and len(soft) == self.classes]
        return torch.stack(known).mean(0) if known else None

"""Does a late update know something that the others do not? FedDC Eq. 7, Intertwined Eq. 7-8.

Compared are the deltas of one moment: the late one and those that came in time from the same
model. Of each only a sketch is kept, in which cosines are right to about 1/sqrt(WIDTH), so that
memory does not grow with the delay.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView

Rule = Literal["nearest", "mean", "off"]
WIDTH = 512
PEERS = 64  # sketches kept per version


def sketch(delta: Tensor) -> Tensor:
    """A short vector of length 1; dot products of two are about the cosines of the deltas."""
    signs = _signs(delta.numel())
    folded = F.pad(delta * signs, (0, -delta.numel() % WIDTH)).view(-1, WIDTH).sum(0)
    return F.normalize(folded, dim=0)


@lru_cache(maxsize=16)
def _signs(size: int) -> Tensor:
    rng = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=rng).mul_(2).sub_(1).float()


def is_unique(late: Tensor, peers: Tensor, rule: Rule) -> bool:
    """Whether the late sketch stands apart from those of its peers (rows).

    "mean" is Eq. 8 (with i != j): the mean distance to the peers exceeds the mean distance among
    them. "nearest": the distance to the closest peer exceeds half the mean distance among them;
    a group of a few alike among many others is unique by "mean" and not by this.
    """
    count = len(peers)
    if rule == "off" or count < 2:
        return True
    total = peers.sum(0)
    # The sum over all pairs i != j of unit vectors, without forming the pairs.
    among = 1.0 - ((total @ total).item() - count) / (count * (count - 1))
    distances = 1.0 - peers @ late
    if rule == "mean":
        return distances.mean().item() > among
    return distances.min().item() > 0.5 * among


class Peers:
    """Sketches of the updates that came in time, as long as somebody is still out with that model.

    Where a model has fewer than two (fully asynchronous modes), the latest ones are asked instead.
    """

    def __init__(self) -> None:
        self._of_version: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, contribution: Contribution, view: ServerView) -> None:
        key = (contribution.task.version, contribution.delta.numel())
        if key not in self._of_version:
            self._prune(view)
        peers = self._of_version.setdefault(key, [])
        if len(peers) < PEERS and contribution.delta.any():  # nothing has no direction
            peers.append(sketch(contribution.delta))

    def of(self, contribution: Contribution) -> Tensor:
        """The peers of a late contribution, one per row."""
        size = contribution.delta.numel()
        found = self._of_version.get((contribution.task.version, size), [])
        if len(found) < 2:
            alike = (some for key, some in self._of_version.items() if key[1] == size)
            found = [one for some in alike for one in some][-PEERS:]
        return torch.stack(found) if found else torch.empty(0, WIDTH)

    def _prune(self, view: ServerView) -> None:
        recent = set(list(self._of_version)[-PEERS:])
        self._of_version = {
            key: some
            for key, some in self._of_version.items()
            if view.store.pins(key[0]) or key in recent
        }

    def state(self) -> dict[str, Any]:
        return {"of": {key: torch.stack(some) for key, some in self._of_version.items() if some}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._of_version = {key: list(rows.unbind()) for key, rows in state["of"].items()}

"""The uniqueness gate: whether a late update differs from those on time. Intertwined, Eq. 7 and 8.

The late delta is compared by cosine distance (FedDC, Eq. 7) with the deltas that arrived on time
from the same model version. Only a random-sign sketch of each is kept, in which cosines have an
error of about 1/sqrt(SKETCH_SIZE), so memory does not grow with the delay.
"""

from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful

Gate = Literal["nearest", "mean", "off"]
SKETCH_SIZE = 512
MAX_PEERS = 64  # sketches kept per version


def sketch(delta: Tensor) -> Tensor:
    """A unit vector of SKETCH_SIZE; dot products of two approximate the cosines of the deltas."""
    signs = _signs(delta.numel())
    folded = F.pad(delta * signs, (0, -delta.numel() % SKETCH_SIZE)).view(-1, SKETCH_SIZE).sum(0)
    return F.normalize(folded, dim=0)


@lru_cache(maxsize=16)
def _signs(size: int) -> Tensor:
    rng = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size,), generator=rng).mul_(2).sub_(1).float()


def is_unique(late: Tensor, peers: Tensor, gate: Gate) -> bool:
    """Whether the late sketch is far from those of its peers (rows).

    "mean" is Eq. 8 (with i != j): the mean distance to the peers exceeds the mean distance among
    them. "nearest": the distance to the closest peer exceeds half the mean distance among them;
    so a late update with one similar peer among many others is not unique. "off": always True.
    """
    count = len(peers)
    if gate == "off" or count < 2:
        return True
    total = peers.sum(0)
    # The sum over all pairs i != j of unit vectors, without forming the pairs.
    among = 1.0 - ((total @ total).item() - count) / (count * (count - 1))
    distances = 1.0 - peers @ late
    if gate == "mean":
        return distances.mean().item() > among
    return distances.min().item() > 0.5 * among


class Peers(Stateful):
    """Sketches of the updates on time, by model version, while a task on that version is open.

    For a version with fewer than two (fully asynchronous modes) the latest of all versions serve.
    """

    kept = ("_of_version",)

    def __init__(self) -> None:
        self._of_version: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, contribution: Contribution, view: ServerView) -> None:
        key = (contribution.task.version, contribution.delta.numel())
        if key not in self._of_version:
            self._prune(view)
        peers = self._of_version.setdefault(key, [])
        if len(peers) < MAX_PEERS and contribution.delta.any():  # a zero delta has no direction
            peers.append(sketch(contribution.delta))

    def of(self, contribution: Contribution) -> Tensor:
        """The peers of a late contribution, one per row."""
        size = contribution.delta.numel()
        found = self._of_version.get((contribution.task.version, size), [])
        if len(found) < 2:
            same_size = (some for key, some in self._of_version.items() if key[1] == size)
            found = [one for some in same_size for one in some][-MAX_PEERS:]
        return torch.stack(found) if found else torch.empty(0, SKETCH_SIZE)

    def _prune(self, view: ServerView) -> None:
        recent = set(list(self._of_version)[-MAX_PEERS:])
        self._of_version = {
            key: some
            for key, some in self._of_version.items()
            if view.store.pins(key[0]) or key in recent
        }

"""Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992.

The average of the models on the way is nearer to the goal than the last one where noise moves them
to and fro. With the weights of Shamir and Zhang 2013 (polynomial decay) the beginning of the way is
forgotten.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DECAY = 3.0  # the average goes back mostly over the last quarter of the way
TURNS = 20.0  # but is no older on average: the world may have changed


class Averages:
    """By lineage the average of what it has come to, commit by commit since that began."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, Tensor]] = {}  # commits, average

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, lineage: str) -> bool:
        return lineage in self._found

    def copy(self, parent: str, child: str) -> None:
        if parent in self._found:
            self._found[child] = self._found[parent]

    def begin(self, lineage: str, params: Tensor) -> None:
        self._found[lineage] = (0, params)

    def add(self, lineage: str, params: Tensor, turns: float) -> None:
        """Another model, after this part of a turn of all devices."""
        commits, average = self._found[lineage]
        share = gain(commits + 1, turns)
        self._found[lineage] = (commits + 1, torch.lerp(average, params, share))

    def get(self, lineage: str, otherwise: Tensor) -> Tensor:
        return self._found[lineage][1] if lineage in self._found else otherwise

    def forget(self, *lineages: str) -> None:
        for lineage in lineages:
            self._found.pop(lineage, None)

    def state(self) -> dict[str, Any]:
        return dict(self._found)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._found = {lineage: (commits, mean) for lineage, (commits, mean) in state.items()}


def gain(commits: int, turns: float) -> float:
    """The share of the newest of so many models in their average."""
    return min(1.0, max((DECAY + 1.0) / (DECAY + commits), turns / TURNS))

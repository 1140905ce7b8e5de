"""The model versions in use, under one global commit number."""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import MAIN


@dataclass(slots=True)
class _Held:
    """A stored version: sent to `pins` open tasks, and the head of `heads` lineages."""

    params: Tensor
    pins: int = 0
    heads: int = 0


class ModelStore:
    """Heads of lineages, and the versions that open tasks were sent.

    A version is stored while it is a head or pinned, so the number of stored models is at most
    that of lineages plus that of models sent to open tasks. Each lineage also keeps the numbers of
    its commits since the oldest stored version (8 bytes each), from which staleness is counted;
    this stays correct when a device moves to another lineage, and after a fork or a merge.
    """

    def __init__(self, params: Tensor) -> None:
        self.commits = 0
        self._held: dict[int, _Held] = {0: _Held(params, heads=1)}
        self._heads: dict[str, int] = {MAIN: 0}
        self._history: dict[str, array[int]] = {MAIN: array("q")}
        self._absorbed: dict[str, str] = {}

    @property
    def lineages(self) -> tuple[str, ...]:
        return tuple(self._heads)

    @property
    def versions(self) -> tuple[int, ...]:
        """The numbers of all stored versions."""
        return tuple(self._held)

    def __contains__(self, lineage: str) -> bool:
        return lineage in self._heads

    def resolve(self, lineage: str) -> str:
        """`lineage`, the lineage that absorbed it, or the main one if a roll-back closed it."""
        while lineage in self._absorbed:
            lineage = self._absorbed[lineage]
        return lineage if lineage in self._heads else MAIN

    def head(self, lineage: str = MAIN) -> int:
        return self._heads[lineage]

    def params(self, version: int) -> Tensor:
        """The parameters of a stored version; shared, so they must not be changed."""
        return self._held[version].params

    def head_params(self, lineage: str = MAIN) -> Tensor:
        return self.params(self.head(lineage))

    def pins(self, version: int) -> int:
        """Number of open tasks that were sent this version."""
        held = self._held.get(version)
        return 0 if held is None else held.pins

    def staleness(self, version: int, lineage: str = MAIN) -> int:
        """Commits on `lineage` since `version`."""
        history = self._history[lineage]
        return len(history) - bisect_right(history, version)

    def commit(self, lineage: str, params: Tensor) -> int:
        """Make `params` the head of `lineage`; returns its version."""
        self.commits += 1
        self._held[self.commits] = _Held(params, heads=1)
        self._release_head(self._heads[lineage])
        self._heads[lineage] = self.commits
        history = self._history[lineage]
        history.append(self.commits)
        if len(history) & 1023 == 0:
            oldest = next(iter(self._held))
            del history[: bisect_right(history, oldest)]
        return self.commits

    def pin(self, version: int) -> None:
        self._held[version].pins += 1

    def unpin(self, version: int) -> None:
        self._held[version].pins -= 1
        self._drop_if_unused(version)

    def fork(self, parent: str, child: str) -> None:
        """Open the lineage `child` with the head of `parent`."""
        if child in self._heads or child in self._absorbed:
            raise ValueError(f"lineage {child!r} exists already")
        version = self._heads[parent]
        self._held[version].heads += 1
        self._heads[child] = version
        self._history[child] = array("q", self._history[parent])

    def absorb(self, into: str, gone: str) -> None:
        """Close `gone`; staleness of its versions is counted on `into` from now on."""
        if into == gone:
            raise ValueError(f"lineage {into!r} cannot absorb itself")
        self._release_head(self._heads.pop(gone))
        del self._history[gone]
        self._absorbed[gone] = into

    def roll_back(self, params: Tensor) -> int:
        """Make `params` the head of the main lineage and close all others; returns its version."""
        heads, self._heads, self._absorbed = self._heads, {MAIN: self.commits + 1}, {}
        self.commits += 1
        self._held[self.commits] = _Held(params, heads=1)
        self._history = {MAIN: array("q", [self.commits])}
        for version in heads.values():
            self._release_head(version)
        return self.commits

    def _release_head(self, version: int) -> None:
        self._held[version].heads -= 1
        self._drop_if_unused(version)

    def _drop_if_unused(self, version: int) -> None:
        held = self._held[version]
        if not held.pins and not held.heads:
            del self._held[version]

    def state(self) -> dict[str, Any]:
        return {
            "commits": self.commits,
            "held": {number: [h.params, h.pins, h.heads] for number, h in self._held.items()},
            "heads": dict(self._heads),
            "history": {
                name: torch.tensor(history, dtype=torch.int64)
                for name, history in self._history.items()
            },
            "absorbed": dict(self._absorbed),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.commits = state["commits"]
        self._held = {number: _Held(*fields) for number, fields in state["held"].items()}
        self._heads = dict(state["heads"])
        self._history = {name: array("q", h.tolist()) for name, h in state["history"].items()}
        self._absorbed = dict(state["absorbed"])

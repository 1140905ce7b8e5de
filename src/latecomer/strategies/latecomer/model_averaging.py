"""Averaging of the deployed model over commits, where devices add privacy noise.

Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992: with noise
the models scatter around the optimum, and their average is nearer to it than the last one. The
weights of Shamir and Zhang 2013 (polynomial decay) reduce the share of early models.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Action, Commit, Observer, ServerView
from latecomer.strategies.parts.switch_off import switch_note

DECAY = 3.0  # exponent: most of the weight is on the last quarter of the commits
WINDOW_PASSES = 20.0  # fleet passes, the largest mean age of the average
BEGIN_ABOVE, END_BELOW = 1 / 2, 1 / 3  # share of the devices that add noise


class ModelAveraging(Observer):
    """Observer: per lineage the weighted mean of its models, while most devices add noise."""

    kept = ("_devices", "_noisy", "_active", "_averages")

    def __init__(self) -> None:
        self._devices: set[int] = set()
        self._noisy: set[int] = set()  # devices whose last update had privacy noise
        self._active = False
        self._averages: dict[str, tuple[int, Tensor]] = {}  # lineage -> commits, mean
        self._reasons: list[str] = []

    def average(self, lineage: str, otherwise: Tensor) -> Tensor:
        """The mean model of a lineage, or `otherwise` where models are not averaged."""
        return self._averages[lineage][1] if lineage in self._averages else otherwise

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        """Begin or end averaging by the share of noisy devices."""
        update, device = contribution.update, contribution.task.device
        self._devices.add(device)
        self._noisy.discard(device)
        if update.noise_std or update.epsilon:
            self._noisy.add(device)
        share = len(self._noisy) / len(self._devices)
        if self._active != (share > (END_BELOW if self._active else BEGIN_ABOVE)):
            self._active = not self._active
            self._reasons.append(
                "most devices add privacy noise: the average of the last models is deployed"
                if self._active
                else "few devices add privacy noise: the last model is deployed"
            )
        lineage = contribution.lineage
        if not self._active:
            self._averages.clear()
        elif lineage not in self._averages:
            self._averages[lineage] = (0, view.store.head_params(lineage))

    def on_commit(self, commit: Commit, view: ServerView) -> None:
        if commit.lineage in self._averages:
            here = sum(view.lineage_of(device) == commit.lineage for device in self._devices)
            passes = commit.contributions / max(1, here)
            commits, mean = self._averages[commit.lineage]
            share = newest_weight(commits + 1, passes)
            self._averages[commit.lineage] = (commits + 1, torch.lerp(mean, commit.params, share))

    def on_fork(self, parent: str, child: str) -> None:
        if parent in self._averages:
            self._averages[child] = self._averages[parent]

    def on_absorb(self, into: str, gone: str) -> None:
        self._averages.pop(gone, None)

    def act(self, view: ServerView) -> Iterable[Action]:
        reasons, self._reasons = self._reasons, []
        return [switch_note(reason, view.store.commits) for reason in reasons]


def newest_weight(commits: int, passes: float) -> float:
    """The weight of the newest of `commits` models, made after `passes` of a fleet pass."""
    return min(1.0, max((DECAY + 1.0) / (DECAY + commits), passes / WINDOW_PASSES))

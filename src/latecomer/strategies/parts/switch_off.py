"""When to stop repairing: FedDC Algorithm 1 as corrected in docs/papers.md, with a smooth end.

A device's next update is the truth for an earlier estimate. Once most estimates of a lineage are
further from the truth than the stale updates were, compensation fades out there: the share gamma
of the estimate falls from 1 to 0 over `decay` of the time before the switch (Intertwined,
section 3.2). Time is counted in commits.

Past the papers, in which all who are late are equally late: who is far later than those who were
judged has more to gain, and can be spared until it has been judged itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Note

HALF_NORMAL = 2.0 / math.pi  # the squared mean of |z|, z standard normal


def switch_note(reason: str, version: int, lineage: str = "") -> Note:
    """The line of the log that says why a part begins or ends, for a lineage or for all."""
    return Note("switch", {"lineage": lineage, "version": version, "reason": reason})


def error(guess: Tensor, truth: Tensor, noise_variance: float = 0.0) -> float:
    """Mean absolute difference, without the part that public noise of this variance makes.

    Infinite where the guess has diverged.

    Differences and noise are taken as normal: then E|d + noise|^2 = 2/pi (var d + var noise).
    """
    seen = torch.mean((guess - truth).abs()).item()
    if not math.isfinite(seen):
        return math.inf
    return math.sqrt(max(seen**2 - HALF_NORMAL * noise_variance, 0.0))


@portable
@dataclass(frozen=True, slots=True)
class Vote:
    """What a device's truth said of its estimate, which was made from an update so stale."""

    at: int
    staleness: int
    estimated: float
    stale: float


@portable
@dataclass(frozen=True, slots=True)
class Ended:
    """Compensation fades out since `at` for what is less stale than `below`."""

    at: int
    below: float


class Switch:
    """Per lineage: the last judgement of each device, and since when compensation fades out.

    It fades out for everybody, or with `spare` for those only who are less than so many times as
    stale as the judged usually were; the others go on, and are judged by themselves.
    """

    def __init__(self, decay: float = 0.1, enabled: bool = True, spare: float = 0.0) -> None:
        self.decay, self.enabled, self.spare = decay, enabled, spare
        # device -> when an estimate was last used, and how stale its update was
        self._tried: dict[str, dict[int, tuple[int, int]]] = {}
        self._judged: dict[str, dict[int, Vote]] = {}
        self._ended: dict[str, list[Ended]] = {}  # each for staler ones than the last

    def tried(self, lineage: str, device: int, now: int, staleness: int = 0) -> None:
        """An estimate for this device has been used, and will be judged."""
        self._tried.setdefault(lineage, {})[device] = (now, staleness)

    def judge(
        self,
        lineage: str,
        device: int,
        now: int,
        estimated: float,
        stale: float,
        staleness: int = 0,
    ) -> None:
        """The errors of the estimate and of the stale update, now that the truth is known."""
        below = self.ended_below(lineage)
        votes = self._judged.setdefault(lineage, {})
        # What is judged already has no say in the rest.
        if staleness >= below or device not in votes or votes[device].staleness < below:
            votes[device] = Vote(now, staleness, estimated, stale)

    def decide(self, lineage: str, now: int) -> tuple[float, float] | None:
        """Switch off if most estimates are worse; the two mean errors if it does.

        Each device has one vote, whatever the size of its updates, and it counts for as long
        again as the run had taken when it was cast. Waits for half of the devices on trial.
        """
        recent, below = now // 2, self.ended_below(lineage)
        judged = [
            vote
            for vote in self._judged.get(lineage, {}).values()
            if vote.at >= recent and vote.staleness >= below
        ]
        waiting = sum(
            at >= recent and staleness >= below
            for at, staleness in self._tried.get(lineage, {}).values()
        )
        if not self.enabled or not judged or 2 * len(judged) < waiting:
            return None
        if 2 * sum(vote.estimated > vote.stale for vote in judged) <= len(judged):
            return None
        spared = self.spare * median(vote.staleness for vote in judged)
        end = Ended(now, max(spared, below + 1) if spared else math.inf)
        self._ended.setdefault(lineage, []).append(end)
        return (
            math.fsum(vote.estimated for vote in judged) / len(judged),
            math.fsum(vote.stale for vote in judged) / len(judged),
        )

    def ended_below(self, lineage: str) -> float:
        """How stale an update must be to be repaired still: 0 if all are, infinite if none is."""
        ends = self._ended.get(lineage)
        return ends[-1].below if ends else 0.0

    def gamma(self, lineage: str, now: int, staleness: float = 0.0) -> float:
        """The share of the estimate for an update so stale; the rest is the update itself."""
        ended = next((e for e in self._ended.get(lineage, ()) if staleness < e.below), None)
        if ended is None:
            return 1.0
        window = self.decay * ended.at
        return max(0.0, 1.0 - (now - ended.at) / window) if window else 0.0

    def on_fork(self, parent: str, child: str) -> None:
        """The child's model is the parent's: so are its prospects."""
        self._judged[child] = dict(self._judged.get(parent, {}))
        self._tried[child] = dict(self._tried.get(parent, {}))
        if parent in self._ended:
            self._ended[child] = list(self._ended[parent])

    def on_absorb(self, into: str, gone: str) -> None:
        self._judged.setdefault(into, {}).update(self._judged.pop(gone, {}))
        self._tried.setdefault(into, {}).update(self._tried.pop(gone, {}))
        self._ended.pop(gone, None)

    def state(self) -> dict[str, Any]:
        return {
            "judged": {name: dict(of) for name, of in self._judged.items()},
            "tried": {name: dict(of) for name, of in self._tried.items()},
            "ended": {name: list(ends) for name, ends in self._ended.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._judged = {name: dict(of) for name, of in state["judged"].items()}
        self._tried = {name: dict(of) for name, of in state["tried"].items()}
        self._ended = {name: list(ends) for name, ends in state["ended"].items()}

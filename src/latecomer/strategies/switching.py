"""When to stop repairing: FedDC Algorithm 1 as corrected in docs/papers.md, with a smooth end.

A device's next update is the truth for an earlier estimate. Once most estimates of a lineage are
further from the truth than the stale updates were, compensation fades out there: the share gamma
of the estimate falls from 1 to 0 over `decay` of the time before the switch (Intertwined,
section 3.2). Time is counted in commits.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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


class Switch:
    """Per lineage: the last judgement of each device, and since when compensation fades out."""

    def __init__(self, decay: float = 0.1, enabled: bool = True) -> None:
        self.decay, self.enabled = decay, enabled
        self._tried: dict[str, dict[int, int]] = {}  # device -> when an estimate was last used
        self._judged: dict[str, dict[int, tuple[int, float, float]]] = {}
        self._off_at: dict[str, int] = {}

    def tried(self, lineage: str, device: int, now: int) -> None:
        """An estimate for this device has been used, and will be judged."""
        self._tried.setdefault(lineage, {})[device] = now

    def judge(self, lineage: str, device: int, now: int, estimated: float, stale: float) -> None:
        """The errors of the estimate and of the stale update, now that the truth is known."""
        self._judged.setdefault(lineage, {})[device] = (now, estimated, stale)

    def decide(self, lineage: str, now: int) -> tuple[float, float] | None:
        """Switch off if most estimates are worse; the two mean errors if it does.

        Each device has one vote, whatever the size of its updates, and it counts for as long
        again as the run had taken when it was cast. Waits for half of the devices on trial.
        """
        recent = now // 2
        judged = [
            (estimated, stale)
            for at, estimated, stale in self._judged.get(lineage, {}).values()
            if at >= recent
        ]
        waiting = sum(at >= recent for at in self._tried.get(lineage, {}).values())
        if not self.enabled or lineage in self._off_at or not judged or 2 * len(judged) < waiting:
            return None
        if 2 * sum(estimated > stale for estimated, stale in judged) <= len(judged):
            return None
        self._off_at[lineage] = now
        estimates, stales = zip(*judged, strict=True)
        return math.fsum(estimates) / len(judged), math.fsum(stales) / len(judged)

    def gamma(self, lineage: str, now: int) -> float:
        """The share of the estimate; the rest is the stale update."""
        off_at = self._off_at.get(lineage)
        if off_at is None:
            return 1.0
        window = self.decay * off_at
        return max(0.0, 1.0 - (now - off_at) / window) if window else 0.0

    def on_fork(self, parent: str, child: str) -> None:
        """The child's model is the parent's: so are its prospects."""
        self._judged[child] = dict(self._judged.get(parent, {}))
        self._tried[child] = dict(self._tried.get(parent, {}))
        if parent in self._off_at:
            self._off_at[child] = self._off_at[parent]

    def on_absorb(self, into: str, gone: str) -> None:
        self._judged.setdefault(into, {}).update(self._judged.pop(gone, {}))
        self._tried.setdefault(into, {}).update(self._tried.pop(gone, {}))
        self._off_at.pop(gone, None)

    def state(self) -> dict[str, Any]:
        return {
            "judged": {name: dict(of) for name, of in self._judged.items()},
            "tried": {name: dict(of) for name, of in self._tried.items()},
            "off_at": dict(self._off_at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._judged = {name: dict(of) for name, of in state["judged"].items()}
        self._tried = {name: dict(of) for name, of in state["tried"].items()}
        self._off_at = dict(state["off_at"])

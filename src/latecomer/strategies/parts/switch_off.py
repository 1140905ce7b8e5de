"""When to end compensation: FedDC Algorithm 1 as corrected in docs/papers.md, with a smooth end.

A device's next update validates an earlier estimate. Once the last estimates of most devices of a
lineage have larger errors than the stale updates they replaced, compensation fades out there: the
share gamma of the estimate falls from 1 to 0 within `decay` times the commits made until then
(Intertwined, section 3.2). Time is counted in commits.

Ours, because in the papers all late devices are equally late: with `exemption`, updates much staler
than the validated ones are still compensated until estimates of such updates are validated too.
"""

import math
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.outcomes import Note
from latecomer.core.strategy import Observer

HALF_NORMAL = 2.0 / math.pi  # the squared mean of |z|, z standard normal


def switch_note(reason: str, version: int, lineage: str = "") -> Note:
    """A log line saying why a part begins or ends to act, for a lineage or for all."""
    return Note("switch", {"lineage": lineage, "version": version, "reason": reason})


def error(guess: Tensor, delta: Tensor, noise_variance: float = 0.0) -> float:
    """sqrt((mean |guess - delta|)^2 - 2/pi * noise_variance), at least 0.

    This is the mean absolute difference d without noise, if both are normal:
    (E|d + noise|)^2 = 2/pi (var d + var noise). Infinite if the guess is not finite.
    """
    seen = torch.mean((guess - delta).abs()).item()
    if not math.isfinite(seen):
        return math.inf
    return math.sqrt(max(seen**2 - HALF_NORMAL * noise_variance, 0.0))


@portable
@dataclass(frozen=True, slots=True)
class Validated:
    """The errors of a device's estimate and of its stale update, `staleness` commits old."""

    at: int
    staleness: int
    estimated: float
    stale: float


@portable
@dataclass(frozen=True, slots=True)
class Ended:
    """Compensation fades out since commit `at` for updates less stale than `below`."""

    at: int
    below: float


class SwitchOff(Observer):
    """Per lineage: the last validation of each device, and since when compensation fades out.

    It fades out for all updates; with `exemption` > 0 only for those less than `exemption` times
    as stale as the validated ones (median). `decay` is the length of the fade-out as a share of the
    commits before it; `enabled` False never ends compensation.
    """

    kept = ("_used", "_validated", "_ended")

    def __init__(self, decay: float = 0.1, enabled: bool = True, exemption: float = 0.0) -> None:
        self.decay, self.enabled, self.exemption = decay, enabled, exemption
        # device -> when an estimate was last used, and how stale its update was
        self._used: dict[str, dict[int, tuple[int, int]]] = {}
        self._validated: dict[str, dict[int, Validated]] = {}
        self._ended: dict[str, list[Ended]] = {}  # each with a larger `below` than the one before

    def used(self, lineage: str, device: int, now: int, staleness: int = 0) -> None:
        """An estimate for this device was used and will be validated."""
        self._used.setdefault(lineage, {})[device] = (now, staleness)

    def record(
        self,
        lineage: str,
        device: int,
        now: int,
        estimated: float,
        stale: float,
        staleness: int = 0,
    ) -> None:
        """The errors of the device's estimate and stale update against its next update."""
        below = self.ended_below(lineage)
        known = self._validated.setdefault(lineage, {})
        # Updates for which compensation has ended do not replace results on staler ones.
        if staleness >= below or device not in known or known[device].staleness < below:
            known[device] = Validated(now, staleness, estimated, stale)

    def decide(self, lineage: str, now: int) -> tuple[float, float] | None:
        """End compensation if most estimates are worse; returns the two mean errors if it ends.

        Each device counts once, whatever the size of its updates. Only validations and uses in the
        last half of the commits so far count. Returns None while less than half of the devices
        whose estimates were used are validated.
        """
        recent, below = now // 2, self.ended_below(lineage)
        validated = [
            each
            for each in self._validated.get(lineage, {}).values()
            if each.at >= recent and each.staleness >= below
        ]
        used = sum(
            at >= recent and staleness >= below
            for at, staleness in self._used.get(lineage, {}).values()
        )
        if not self.enabled or not validated or 2 * len(validated) < used:
            return None
        if 2 * sum(each.estimated > each.stale for each in validated) <= len(validated):
            return None
        exempt = self.exemption * median(each.staleness for each in validated)
        end = Ended(now, max(exempt, below + 1) if exempt else math.inf)
        self._ended.setdefault(lineage, []).append(end)
        return (
            math.fsum(each.estimated for each in validated) / len(validated),
            math.fsum(each.stale for each in validated) / len(validated),
        )

    def ended_below(self, lineage: str) -> float:
        """The staleness from which updates are still compensated: 0 all, infinite none."""
        ends = self._ended.get(lineage)
        return ends[-1].below if ends else 0.0

    def gamma(self, lineage: str, now: int, staleness: float = 0.0) -> float:
        """The share of the estimate in the result for an update this stale."""
        ended = next((e for e in self._ended.get(lineage, ()) if staleness < e.below), None)
        if ended is None:
            return 1.0
        window = self.decay * ended.at
        return max(0.0, 1.0 - (now - ended.at) / window) if window else 0.0

    def on_fork(self, parent: str, child: str) -> None:
        """The child starts with the parent's model, so with its validations too."""
        self._validated[child] = dict(self._validated.get(parent, {}))
        self._used[child] = dict(self._used.get(parent, {}))
        if parent in self._ended:
            self._ended[child] = list(self._ended[parent])

    def on_absorb(self, into: str, gone: str) -> None:
        self._validated.setdefault(into, {}).update(self._validated.pop(gone, {}))
        self._used.setdefault(into, {}).update(self._used.pop(gone, {}))
        self._ended.pop(gone, None)

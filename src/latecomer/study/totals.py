"""Totals over a run, added up from the server's typed outcomes, for summary.json and warnings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from latecomer.core.outcomes import (
    Accepted,
    BroadcastMade,
    ClusterMerged,
    ClusterSplit,
    Compensation,
    CompensationEnded,
    Dropped,
    Logged,
    Quarantined,
    Refused,
    Retired,
    RolledBack,
)


@dataclass
class RunTotals:
    """Counts of outcomes since the start of the run; a checkpoint holds them."""

    arrivals: int = 0  # accepted updates with a delta
    staleness_sum: int = 0
    staleness_max: int = 0
    refused: int = 0
    dropped: int = 0
    compensated: int = 0
    compensation_seconds: float = 0.0
    switched_at: int | None = None  # the commit at which compensation first ended
    splits: int = 0
    merges: int = 0
    broadcasts: int = 0
    retired: int = 0
    quarantines: int = 0
    rollbacks: int = 0
    last_rollback: str = ""  # its reason
    epsilon: dict[int, float] = field(default_factory=dict)  # device -> largest reported
    last_failure: str = ""  # why the last update was refused or dropped

    def add(self, outcome: Logged) -> None:
        match outcome:
            case Accepted(device=device, staleness=staleness, epsilon=epsilon):
                if staleness is not None:
                    self.arrivals += 1
                    self.staleness_sum += staleness
                    self.staleness_max = max(self.staleness_max, staleness)
                self._spend(device, epsilon)
            case Refused(device=device, reason=reason, epsilon=epsilon):
                self.refused, self.last_failure = self.refused + 1, reason
                self._spend(device, epsilon)
            case Dropped(reason=reason):
                self.dropped, self.last_failure = self.dropped + 1, reason
            case Compensation(gamma=gamma, seconds=seconds):
                self.compensated += gamma > 0
                self.compensation_seconds += seconds
            case CompensationEnded(version=version):
                self.switched_at = version if self.switched_at is None else self.switched_at
            case ClusterSplit():
                self.splits += 1
            case ClusterMerged():
                self.merges += 1
            case BroadcastMade():
                self.broadcasts += 1
            case Retired(device=device, epsilon=spent):
                self.retired += 1
                self._spend(device, spent)

            case Quarantined():
                self.quarantines += 1
            case RolledBack(reason=reason):
                self.rollbacks, self.last_rollback = self.rollbacks + 1, reason

    def _spend(self, device: int | None, epsilon: float | None) -> None:
        """Keep the largest value: uploads that overtake each other bring older ledgers later."""
        if device is not None and epsilon:
            self.epsilon[device] = max(epsilon, self.epsilon.get(device, 0.0))

    @property
    def failures(self) -> int:
        """Updates that were refused, dropped or lost."""
        return self.refused + self.dropped

    @property
    def staleness(self) -> dict[str, float]:
        mean = self.staleness_sum / self.arrivals if self.arrivals else 0.0
        return {"mean": mean, "max": self.staleness_max}

    @property
    def compensation(self) -> dict[str, Any]:
        return {
            "count": self.compensated,
            "seconds": self.compensation_seconds,
            "switched_at": self.switched_at,
        }

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, dict(value) if isinstance(value, Mapping) else value)

"""The time unit of the charts: seconds, minutes, hours or days."""

from collections.abc import Iterable
from dataclasses import dataclass

UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


@dataclass(frozen=True)
class Clock:
    """Converts seconds of virtual time to the unit that all charts of a page share."""

    unit: str
    seconds: float

    @property
    def title(self) -> str:
        return f"virtual time ({self.unit})"

    def __call__(self, seconds: float) -> float:
        return seconds / self.seconds

    def each(self, seconds: Iterable[float]) -> list[float]:
        return [value / self.seconds for value in seconds]


def clock_for(horizon: float) -> Clock:
    """The largest unit of which `horizon` (seconds) is at least three."""
    for unit, size in UNITS:
        if horizon >= 3 * size:
            return Clock(unit, size)
    return Clock("seconds", 1.0)

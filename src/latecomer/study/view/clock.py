"""Virtual time on an axis, in a unit that people read."""

from collections.abc import Iterable
from dataclasses import dataclass

UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))


@dataclass(frozen=True)
class Clock:
    """All charts of one page count time in the same unit."""

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
    """The unit of which `horizon` is at least three."""
    for unit, size in UNITS:
        if horizon >= 3 * size:
            return Clock(unit, size)
    return Clock("seconds", 1.0)

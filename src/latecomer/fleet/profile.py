"""What one device is like: speed, links, when it is reachable, and how it fails."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

from latecomer.errors import BadInput

Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values a field may take, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


_SECONDS = Allowed("0 or more, finite", lambda value: 0 <= value < inf)
_RATE = Allowed("above 0, or inf", lambda value: value > 0)
# A wider spread than e to the 10 is a typing error, and overflows soon after.
_SIGMA = Allowed("0 to 10", lambda value: 0 <= value <= 10)
_CHANCE = Allowed("0 to 1", lambda value: 0 <= value <= 1)

ALLOWED = {
    "seconds_per_example": _SECONDS,
    "seconds_per_task": _SECONDS,
    "down": _RATE,
    "up": _RATE,
    "latency": _SECONDS,
    "jitter": _SIGMA,
    "dropout": _CHANCE,
    "crash": _CHANCE,
    "restart_seconds": _SECONDS,
    "detect_seconds": _SECONDS,
    "period": Allowed("above 0, finite", lambda value: 0 < value < inf),
}


def check_field(field: str, value: float) -> None:
    """Raise BadInput unless the numeric field may take this value."""
    allowed = ALLOWED[field]
    if not allowed.holds(value):
        raise BadInput(f"{field} = {value}: allowed is {allowed.words}")


def check_window(start: float, end: float, period: float) -> None:
    """Raise BadInput unless [start, end) is a window of the period; its end may lie in the next."""
    if not 0 <= start < period:
        raise BadInput(f"window_start = {start}: allowed is 0 to below the period of {period}")
    if not (isfinite(end) and start < end <= start + period):
        raise BadInput(
            f"window_end = {end}: allowed is above window_start = {start}, "
            f"by at most the period of {period}"
        )


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device's hardware, links, habits and faults; the defaults are an ideal device."""

    seconds_per_example: float = 0.0
    seconds_per_task: float = 0.0
    down: float = inf  # bytes/s
    up: float = inf  # bytes/s
    latency: float = 0.0  # seconds, each way
    jitter: float = 0.0  # sigma of a lognormal factor of mean 1 on the compute time
    windows: Windows = ()  # reachable [start, end) within each period; () = always
    period: float = 86400.0
    dropout: float = 0.0  # chance per task that the device vanishes for good
    crash: float = 0.0  # chance per task that it crashes in mid-task and restarts
    restart_seconds: float = 60.0
    detect_seconds: float = 60.0  # until the server learns of a loss
    group: str = ""

    def __post_init__(self) -> None:
        for field in ALLOWED:
            check_field(field, getattr(self, field))
        for start, end in self.windows:
            check_window(start, end, self.period)

    def download_seconds(self, size: int) -> float:
        return self.latency + size / self.down

    def compute_seconds(self, examples: float) -> float:
        """Without jitter; `examples` counts every pass over the data."""
        return self.seconds_per_task + self.seconds_per_example * examples

    def upload_seconds(self, size: int) -> float:
        return self.latency + size / self.up

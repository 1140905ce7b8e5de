"""The profile of one device: compute speed, links, availability windows and fault rates."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite

from latecomer.errors import BadInput

Windows = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a field accepts, as text for messages and as a predicate."""

    description: str
    accepts: Callable[[float], bool]


_SECONDS = Allowed("0 or more, finite", lambda value: 0 <= value < inf)
_RATE = Allowed("above 0, or inf", lambda value: value > 0)
# A larger sigma is a typing error, and soon overflows.
_SIGMA = Allowed("0 to 10", lambda value: 0 <= value <= 10)
_PROBABILITY = Allowed("0 to 1", lambda value: 0 <= value <= 1)

ALLOWED = {
    "seconds_per_example": _SECONDS,
    "seconds_per_task": _SECONDS,
    "down": _RATE,
    "up": _RATE,
    "latency": _SECONDS,
    "jitter": _SIGMA,
    "dropout": _PROBABILITY,
    "crash": _PROBABILITY,
    "restart_seconds": _SECONDS,
    "detect_seconds": _SECONDS,
    "period": Allowed("above 0, finite", lambda value: 0 < value < inf),
}


def check_field(field: str, value: float) -> None:
    """Raise BadInput unless `ALLOWED[field]` accepts the value."""
    allowed = ALLOWED[field]
    if not allowed.accepts(value):
        raise BadInput(f"{field} = {value}: allowed is {allowed.description}")


def check_window(start: float, end: float, period: float) -> None:
    """Raise BadInput unless start is in the period and end at most one period after start."""
    if not 0 <= start < period:
        raise BadInput(f"window_start = {start}: allowed is 0 to below the period of {period}")
    if not (isfinite(end) and start < end <= start + period):
        raise BadInput(
            f"window_end = {end}: allowed is above window_start = {start}, "
            f"by at most the period of {period}"
        )


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Compute speed, links, availability and faults of a device; the defaults are an ideal one."""

    seconds_per_example: float = 0.0  # compute time per example and pass
    seconds_per_task: float = 0.0  # constant compute time
    down: float = inf  # bytes/s
    up: float = inf  # bytes/s
    latency: float = 0.0  # seconds, each way
    jitter: float = 0.0  # sigma of a lognormal factor of mean 1 on the compute time
    windows: Windows = ()  # reachable [start, end) within each period; () = always
    period: float = 86400.0  # seconds
    dropout: float = 0.0  # probability per task that the device disappears permanently
    crash: float = 0.0  # probability per task that it crashes in mid-task and restarts
    restart_seconds: float = 60.0  # from a crash until the device is back
    detect_seconds: float = 60.0  # from a loss until the server is notified
    group: str = ""  # name of the device class, for reports

    def __post_init__(self) -> None:
        for field in ALLOWED:
            check_field(field, getattr(self, field))
        for start, end in self.windows:
            check_window(start, end, self.period)

    def download_seconds(self, size: int) -> float:
        """Seconds to receive `size` bytes."""
        return self.latency + size / self.down

    def compute_seconds(self, examples: float) -> float:
        """Seconds of training without jitter; `examples` counts every pass over the data."""
        return self.seconds_per_task + self.seconds_per_example * examples

    def upload_seconds(self, size: int) -> float:
        """Seconds to send `size` bytes."""
        return self.latency + size / self.up

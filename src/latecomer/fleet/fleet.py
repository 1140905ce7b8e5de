"""The simulated fleet of a run: device profiles, late devices, and the nominal epoch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from math import ceil, inf
from typing import Any

from latecomer.errors import BadInput, unknown
from latecomer.fleet.availability import close_after, next_open
from latecomer.fleet.late import Lateness
from latecomer.fleet.presets import PROFILES
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.task_times import TaskTimes, is_random, task_time_rng, task_times

QUORUM = 0.7  # share of the devices with data whose tasks end within a nominal epoch
OVERRIDABLE_FIELDS = (
    "dropout",
    "crash",
    "latency",
    "up",
    "down",
    "seconds_per_example",
    "seconds_per_task",
    "jitter",
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Device profiles by id, the lateness of late devices, and the seed of times and faults."""

    devices: tuple[DeviceProfile, ...]
    late: Mapping[int, Lateness] = field(default_factory=dict)
    seed: int = 0
    notes: tuple[str, ...] = ()  # messages to the user about how the fleet was built

    def task_times(
        self, device: int, number: int, now: float, examples: float, bytes_down: int, bytes_up: int
    ) -> TaskTimes:
        """The times of the device's `number`-th task, sent at `now`; see `fleet.task_times`."""
        profile, lateness = self.devices[device], self.late.get(device)
        rng = task_time_rng(self.seed, device, number) if is_random(profile, lateness) else None
        return task_times(profile, lateness, rng, now, examples, bytes_down, bytes_up)

    @property
    def longest_period(self) -> float:
        """The longest window period in seconds: every device is reachable at least once in it."""
        return max(profile.period for profile in self.devices)

    def has_windows(self, device: int) -> bool:
        """Whether the device is unreachable at some time."""
        return bool(self.devices[device].windows) and self.close_after(device, 0.0) < inf

    def next_open(self, device: int, t: float) -> float:
        """The earliest time >= t at which the device is reachable."""
        profile = self.devices[device]
        return next_open(profile.windows, profile.period, t)

    def close_after(self, device: int, t: float) -> float:
        """The end of the window open at t, else of the next one; inf if always reachable."""
        profile = self.devices[device]
        return close_after(profile.windows, profile.period, t)


def make_fleet(
    profile: str,
    devices: int,
    path: str = "",
    seed: int = 0,
    overrides: Mapping[str, float | None] | None = None,
) -> Fleet:
    """A fleet of the preset `profile`, without late devices.

    `overrides` replace profile fields (`OVERRIDABLE_FIELDS`) of all devices; None keeps the
    preset's value. A trace with another number of devices is repeated or cut, with a note.
    """
    if profile not in PROFILES:
        raise unknown("fleet.profile", profile, PROFILES)
    built, notes = PROFILES[profile].build(devices, seed, path)
    profiles = [_override(p, overrides or {}) for p in built]
    notes += _notes(path, len(profiles), devices)
    return Fleet(tuple(islice(cycle(profiles), devices)), seed=seed, notes=notes)


def with_lateness(fleet: Fleet, devices: Iterable[int], lateness: Lateness) -> Fleet:
    """A copy of the fleet in which `devices` also have this lateness; it replaces an older one."""
    return replace(fleet, late={**fleet.late, **dict.fromkeys(devices, lateness)})


def task_seconds(
    profiles: Sequence[DeviceProfile], examples_per_device: Sequence[int], size: int
) -> list[float]:
    """Seconds that each device needs for one task with a model of `size` bytes.

    Jitter, faults, lateness and closed windows are left out. `examples_per_device` counts every
    pass over the data.
    """
    return [
        p.download_seconds(size) + p.compute_seconds(examples) + p.upload_seconds(size)
        for p, examples in zip(profiles, examples_per_device, strict=True)
    ]


def epoch_seconds(
    profiles: Sequence[DeviceProfile], examples_per_device: Sequence[int], size: int
) -> float:
    """The nominal epoch in seconds: the QUORUM-quantile of `task_seconds` over devices with data.

    It is the unit of `fleet.late.delay`.
    """
    seconds = task_seconds(profiles, examples_per_device, size)
    times = sorted(t for t, n in zip(seconds, examples_per_device, strict=True) if n > 0)
    if not times:
        raise BadInput("no device has any data: an epoch needs at least one device with data")
    # In floating point 0.07 * 100 is slightly above 7, and must count as 7.
    needed = max(1, ceil(QUORUM * len(times) - 1e-9))
    return times[needed - 1]


def _override(profile: DeviceProfile, overrides: Mapping[str, float | None]) -> DeviceProfile:
    changes: dict[str, Any] = {
        name: value for name, value in overrides.items() if value is not None
    }
    try:
        return replace(profile, **changes)
    except BadInput as error:
        raise BadInput(f"fleet.{error}") from None


def _notes(path: str, in_file: int, devices: int) -> tuple[str, ...]:
    if in_file == devices:
        return ()
    action = "they are repeated" if in_file < devices else f"only the first {devices} are used"
    return (f"{path} holds {in_file} devices, fleet.devices is {devices}: {action}",)

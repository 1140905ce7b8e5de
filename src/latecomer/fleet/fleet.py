"""All devices of a run, in virtual time."""

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
    """The devices, who of them is late, and the seed of their luck."""

    devices: tuple[DeviceProfile, ...]
    late: Mapping[int, Lateness] = field(default_factory=dict)
    seed: int = 0
    notes: tuple[str, ...] = ()  # what the user should know of how it was made

    def task_times(
        self, device: int, number: int, now: float, examples: float, bytes_down: int, bytes_up: int
    ) -> TaskTimes:
        """What becomes of the device's task of this number, sent at `now`."""
        profile, lateness = self.devices[device], self.late.get(device)
        rng = task_time_rng(self.seed, device, number) if is_random(profile, lateness) else None
        return task_times(profile, lateness, rng, now, examples, bytes_down, bytes_up)

    @property
    def longest_period(self) -> float:
        """Whoever has windows is reachable at least once in this time."""
        return max(profile.period for profile in self.devices)

    def has_windows(self, device: int) -> bool:
        """Whether the device is ever out of reach."""
        return bool(self.devices[device].windows) and self.close_after(device, 0.0) < inf

    def next_open(self, device: int, t: float) -> float:
        """The first moment at or after t at which the device is reachable."""
        profile = self.devices[device]
        return next_open(profile.windows, profile.period, t)

    def close_after(self, device: int, t: float) -> float:
        """When the window that is open at t, or else the next to open, closes; inf if never."""
        profile = self.devices[device]
        return close_after(profile.windows, profile.period, t)


def make_fleet(
    profile: str,
    devices: int,
    path: str = "",
    seed: int = 0,
    overrides: Mapping[str, float | None] | None = None,
) -> Fleet:
    """A fleet of the named preset, nobody late; `overrides` hold for all devices, None keeps.

    A trace of another length than asked is cycled through or cut, and a note says so.
    """
    if devices < 1:
        raise BadInput(f"fleet.devices = {devices}: allowed is 1 or more")
    if profile not in PROFILES:
        raise unknown("fleet.profile", profile, PROFILES)
    built = PROFILES[profile].build(devices, seed, path)
    profiles = tuple(_override(each, overrides or {}) for each in built)
    return Fleet(
        tuple(islice(cycle(profiles), devices)), seed=seed, notes=_notes(path, len(built), devices)
    )


def with_lateness(fleet: Fleet, devices: Iterable[int], lateness: Lateness) -> Fleet:
    """The fleet with these devices late too; a device named again takes the new lateness."""
    late = dict(fleet.late)
    for device in devices:
        if not 0 <= device < len(fleet.devices):
            raise BadInput(f"late device {device}: allowed is 0 to {len(fleet.devices) - 1}")
        late[device] = lateness
    return replace(fleet, late=late)


def task_seconds(
    profiles: Sequence[DeviceProfile], examples_per_device: Sequence[int], size: int
) -> list[float]:
    """What one task with a model of `size` bytes takes each device, luck and lateness left out."""
    return [
        p.download_seconds(size) + p.compute_seconds(examples) + p.upload_seconds(size)
        for p, examples in zip(profiles, examples_per_device, strict=True)
    ]


def epoch_seconds(
    profiles: Sequence[DeviceProfile],
    examples_per_device: Sequence[int],
    size: int,
    quorum: float = 0.7,
) -> float:
    """The nominal epoch: by then a quorum of the devices with data have done one task.

    Jitter, loss, lateness and closed windows are left out: it is a unit of time, and must not
    hang on the hour at which a run starts. `examples_per_device` counts every pass over the data.
    """
    if not 0 < quorum <= 1:
        raise BadInput(f"quorum = {quorum}: allowed is above 0, at most 1")
    each = task_seconds(profiles, examples_per_device, size)
    times = sorted(t for t, n in zip(each, examples_per_device, strict=True) if n > 0)
    if not times:
        raise BadInput("no device has any data: an epoch needs at least one that does")
    # 0.07 * 100 is a hair above 7 in floating point, and must count as 7.
    needed = max(1, ceil(quorum * len(times) - 1e-9))
    return times[needed - 1]


def _override(profile: DeviceProfile, overrides: Mapping[str, float | None]) -> DeviceProfile:
    for name in overrides:
        if name not in OVERRIDABLE_FIELDS:
            raise unknown("fleet key", name, OVERRIDABLE_FIELDS)
    changes: dict[str, Any] = {
        name: value for name, value in overrides.items() if value is not None
    }
    try:
        return replace(profile, **changes)
    except BadInput as error:
        raise BadInput(f"fleet.{error}") from None


def _notes(path: str, recorded: int, asked: int) -> tuple[str, ...]:
    if recorded == asked:
        return ()
    done = "they are cycled through" if recorded < asked else f"only the first {asked} are used"
    return (f"{path} holds {recorded} devices and {asked} are asked for: {done}",)

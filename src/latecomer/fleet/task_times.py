"""What becomes of a task: when it reaches a device, and when its update comes back, if ever."""

from math import exp
from typing import NamedTuple

import numpy as np

from latecomer.fleet.availability import finish, next_open
from latecomer.fleet.late import GAMMA_SHAPE, Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.random_streams import RandomStream, stream_rng


class TaskTimes(NamedTuple):
    """The moments of one task; of a lost one, `downloaded` and `trained` tell what was planned."""

    sent: float
    downloaded: float
    trained: float
    arrives: float | None  # the update reaches the server; None if the task is lost
    free: float | None  # the device can take its next task; None if it has vanished for good
    lost: float | None = None
    reported: float | None = None  # the server learns of the loss
    uploaded: float | None = None  # the upload itself is done; what follows is lateness


def task_time_rng(seed: int, device: int, number: int) -> np.random.Generator:
    """The stream of one task: independent of every other, and of the order of events."""
    return stream_rng(seed, RandomStream.TASK, device, number)


def is_random(profile: DeviceProfile, lateness: Lateness | None) -> bool:
    """Whether luck has a part in the journeys of this device at all."""
    gamma = lateness is not None and lateness.gamma
    return gamma or profile.jitter > 0 or profile.dropout > 0 or profile.crash > 0


def task_times(
    profile: DeviceProfile,
    lateness: Lateness | None,
    rng: np.random.Generator | None,
    now: float,
    examples: float,
    bytes_down: int,
    bytes_up: int,
) -> TaskTimes:
    """Follow a task sent at `now`; `examples` counts every pass over the device's data.

    A task sent to a device out of reach waits for its next window. No `rng` is needed where
    `is_random` says so.
    """
    normal, vanish, crash, fraction, unit = 0.0, 1.0, 1.0, 0.0, 0.0
    if rng is not None:
        # Every draw is made whatever the profile, and the Gamma, whose use of random bits depends
        # on its shape, is last: switching one feature on must not change the luck of another.
        normal = rng.standard_normal()
        vanish, crash, fraction = rng.random(3).tolist()
        unit = rng.standard_gamma(lateness.shape if lateness else GAMMA_SHAPE)

    windows, period = profile.windows, profile.period
    slowdown = exp(profile.jitter * normal - profile.jitter**2 / 2) if profile.jitter else 1.0
    received = next_open(windows, period, now)
    downloaded = finish(windows, period, received, profile.download_seconds(bytes_down))
    trained = finish(windows, period, downloaded, profile.compute_seconds(examples) * slowdown)
    done = finish(windows, period, trained, profile.upload_seconds(bytes_up))

    vanished = vanish < profile.dropout
    if vanished or crash < profile.crash:
        lost = now + fraction * (done - now)
        reported = lost + profile.detect_seconds
        back = next_open(windows, period, max(lost + profile.restart_seconds, reported))
        return TaskTimes(now, downloaded, trained, None, None if vanished else back, lost, reported)
    arrives = done + lateness.extra(unit) if lateness else done
    busy = lateness is not None and lateness.kind == "busy"
    return TaskTimes(now, downloaded, trained, arrives, arrives if busy else done, uploaded=done)

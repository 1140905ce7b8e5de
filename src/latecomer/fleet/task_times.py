"""The virtual times of one task: download, training, upload, lateness, or the loss of the task."""

from math import exp
from typing import NamedTuple

import numpy as np

from latecomer.fleet.availability import finish, next_open
from latecomer.fleet.late import GAMMA_SHAPE, Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.random_streams import RandomStream, stream_rng


class TaskTimes(NamedTuple):
    """Absolute virtual seconds of the steps of one task.

    For a lost task `downloaded` and `trained` are the times without the loss.
    """

    sent: float
    downloaded: float
    trained: float
    arrives: float | None  # the update reaches the server; None if the task is lost
    free: float | None  # the device can take its next task; None after a permanent dropout
    lost: float | None = None  # crash or dropout
    reported: float | None = None  # the server is notified of the loss
    uploaded: float | None = None  # end of the upload without lateness


def task_time_rng(seed: int, device: int, number: int) -> np.random.Generator:
    """The random generator of one task's times and faults, independent of the order of events."""
    return stream_rng(seed, RandomStream.TASK, device, number)


def is_random(profile: DeviceProfile, lateness: Lateness | None) -> bool:
    """Whether the task times of the device depend on random draws."""
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
    """The times of a task sent at `now`; `examples` counts every pass over the device's data.

    A task sent to an unreachable device waits for its next window. `rng` may be None if
    `is_random` is false.
    """
    normal, dropout, crash, fraction, gamma_draw = 0.0, 1.0, 1.0, 0.0, 0.0
    if rng is not None:
        # Every number is drawn for every profile: enabling one feature must not change the draws
        # of another.
        normal = rng.standard_normal()
        dropout, crash, fraction = rng.random(3).tolist()
        gamma_draw = rng.standard_gamma(GAMMA_SHAPE)

    windows, period = profile.windows, profile.period
    slowdown = exp(profile.jitter * normal - profile.jitter**2 / 2) if profile.jitter else 1.0
    received = next_open(windows, period, now)
    downloaded = finish(windows, period, received, profile.download_seconds(bytes_down))
    trained = finish(windows, period, downloaded, profile.compute_seconds(examples) * slowdown)
    done = finish(windows, period, trained, profile.upload_seconds(bytes_up))

    dropped_out = dropout < profile.dropout
    if dropped_out or crash < profile.crash:
        lost = now + fraction * (done - now)
        reported = lost + profile.detect_seconds
        back = next_open(windows, period, max(lost + profile.restart_seconds, reported))
        free = None if dropped_out else back
        return TaskTimes(now, downloaded, trained, None, free, lost, reported)
    arrives = done + lateness.extra_seconds(gamma_draw) if lateness else done
    busy = lateness is not None and lateness.kind == "busy"
    return TaskTimes(now, downloaded, trained, arrives, arrives if busy else done, uploaded=done)

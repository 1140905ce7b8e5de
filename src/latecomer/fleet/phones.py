"""Profiles of a mixed fleet of phones, single-board computers and wearables.

The numbers are our choice, of the magnitude seen in on-device training; none is from a paper.
The compute times of each device are multiplied by a lognormal factor (median 1, sigma
SPEED_SIGMA). Night devices are reachable only while charging, six to nine hours a day. The start
is uniform over the day, as in a fleet spread over time zones.
"""

from dataclasses import dataclass

import numpy as np

from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.random_streams import RandomStream, stream_rng
from latecomer.fleet.submodel_widths import apportion

HOUR = 3600.0
DAY = 24 * HOUR
SPEED_SIGMA = 0.3
NIGHT_HOURS = (6.0, 9.0)


@dataclass(frozen=True, slots=True)
class Link:
    """An asymmetric network link."""

    down: float  # bytes/s
    up: float  # bytes/s
    latency: float  # seconds, each way


WIFI = Link(5.0e6, 2.0e6, 0.02)
LTE = Link(2.5e6, 0.75e6, 0.06)
UMTS = Link(0.25e6, 0.1e6, 0.20)
LINKS = (WIFI, LTE, UMTS)


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Parameters of one class of devices; `links` are the probabilities of Wi-Fi, 4G and 3G."""

    name: str
    percent: int
    seconds_per_example: float
    seconds_per_task: float
    jitter: float
    links: tuple[float, float, float]
    night: float  # probability that a device is reachable only while charging at night
    crash: float
    dropout: float


# fmt: off
CLASSES = (
    #           name           %   s/example  s/task jitter  Wi-Fi/4G/3G       night crash dropout
    DeviceClass("flagship",    20, 0.004,     0.5,   0.15,   (0.7, 0.3, 0.0),  0.3,  0.002, 0.0002),
    DeviceClass("mid-range",   35, 0.012,     1.0,   0.20,   (0.5, 0.4, 0.1),  0.4,  0.005, 0.0002),
    DeviceClass("budget",      25, 0.040,     2.0,   0.30,   (0.4, 0.4, 0.2),  0.5,  0.010, 0.0005),
    DeviceClass("raspberry",   10, 0.080,     1.0,   0.05,   (1.0, 0.0, 0.0),  0.0,  0.001, 0.0001),
    DeviceClass("wearable",    10, 0.250,     4.0,   0.25,   (0.8, 0.2, 0.0),  0.5,  0.010, 0.0010),
)
# fmt: on


def phones(devices: int, seed: int) -> tuple[DeviceProfile, ...]:
    """Profiles drawn from CLASSES and LINKS: exact class shares, in random order of device ids."""
    rng = stream_rng(seed, RandomStream.PHONES)
    counts = apportion(devices, [device_class.percent for device_class in CLASSES])
    order = rng.permutation(np.repeat(np.arange(len(CLASSES)), counts))
    return tuple(_draw(CLASSES[position], rng) for position in order.tolist())


def _draw(device_class: DeviceClass, rng: np.random.Generator) -> DeviceProfile:
    slowness = float(np.exp(SPEED_SIGMA * rng.standard_normal()))
    link = LINKS[int(rng.choice(len(LINKS), p=device_class.links))]
    night_draw, start_draw, length_draw = rng.random(3).tolist()
    shortest, longest = NIGHT_HOURS
    start = start_draw * DAY
    window = (start, start + (shortest + length_draw * (longest - shortest)) * HOUR)
    return DeviceProfile(
        seconds_per_example=device_class.seconds_per_example * slowness,
        seconds_per_task=device_class.seconds_per_task * slowness,
        down=link.down,
        up=link.up,
        latency=link.latency,
        jitter=device_class.jitter,
        windows=(window,) if night_draw < device_class.night else (),
        period=DAY,
        dropout=device_class.dropout,
        crash=device_class.crash,
        group=device_class.name,
    )

"""A plausible mixed fleet of phones, single-board computers and wearables.

The figures are our choice, of the order seen in on-device training; none comes from a paper.
Within a class each device's compute time carries a lognormal factor (median 1, sigma SPREAD).
Night devices are reachable only while charging, six to nine hours a day, from a moment drawn
over the whole day: the nights of a fleet spread over time zones.
"""

from dataclasses import dataclass

import numpy as np

from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.random_streams import RandomStream, stream_rng
from latecomer.fleet.shares import apportion

HOUR = 3600.0
DAY = 24 * HOUR
SPREAD = 0.3
NIGHT_HOURS = (6.0, 9.0)


@dataclass(frozen=True, slots=True)
class Link:
    """An asymmetric connection."""

    down: float  # bytes/s
    up: float
    latency: float  # seconds


WIFI = Link(5.0e6, 2.0e6, 0.02)
LTE = Link(2.5e6, 0.75e6, 0.06)
UMTS = Link(0.25e6, 0.1e6, 0.20)
LINKS = (WIFI, LTE, UMTS)


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """One class of devices; `links` are the chances of Wi-Fi, 4G and 3G."""

    name: str
    percent: int
    seconds_per_example: float
    seconds_per_task: float
    jitter: float
    links: tuple[float, float, float]
    night: float  # the chance to be reachable only while charging at night
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
    """The classes in exact shares, shuffled over the ids; see CLASSES and LINKS for the figures."""
    rng = stream_rng(seed, RandomStream.PHONES)
    counts = apportion(devices, [kind.percent for kind in CLASSES])
    order = rng.permutation(np.repeat(np.arange(len(CLASSES)), counts))
    return tuple(_draw(CLASSES[position], rng) for position in order.tolist())


def _draw(kind: DeviceClass, rng: np.random.Generator) -> DeviceProfile:
    slowness = float(np.exp(SPREAD * rng.standard_normal()))
    link = LINKS[int(rng.choice(len(LINKS), p=kind.links))]
    at_night, starts, lasts = rng.random(3).tolist()
    shortest, longest = NIGHT_HOURS
    start = starts * DAY
    window = (start, start + (shortest + lasts * (longest - shortest)) * HOUR)
    return DeviceProfile(
        seconds_per_example=kind.seconds_per_example * slowness,
        seconds_per_task=kind.seconds_per_task * slowness,
        down=link.down,
        up=link.up,
        latency=link.latency,
        jitter=kind.jitter,
        windows=(window,) if at_night < kind.night else (),
        period=DAY,
        dropout=kind.dropout,
        crash=kind.crash,
        group=kind.name,
    )

"""The fleet presets that `fleet.profile` can name."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from latecomer.fleet.phones import phones
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.random_streams import RandomStream, stream_rng
from latecomer.fleet.submodel_widths import apportion
from latecomer.fleet.trace import read_trace

UNIFORM_SECONDS = 10.0

# Name, weight, slowness. PrivaAsyncFed gives the four types and their numbers (3, 3, 2, 2) but no
# speeds; halving the speed from type to type is our choice.
TIERS = (("fast", 3, 1.0), ("medium-fast", 3, 2.0), ("medium-slow", 2, 4.0), ("slow", 2, 8.0))
TIER_SECONDS_PER_EXAMPLE = 0.01
TIER_SECONDS_PER_TASK = 1.0
TIER_DOWN = 2.5e6  # 20 Mbit/s
TIER_UP = 0.625e6  # 5 Mbit/s
TIER_LATENCY = 0.05

GAMMA_SHAPE = 2.0
GAMMA_MEAN = 0.1  # seconds per example


def uniform(devices: int) -> tuple[DeviceProfile, ...]:
    """Identical devices: every task takes 10 s, independent of its data; ideal links."""
    return (DeviceProfile(seconds_per_task=UNIFORM_SECONDS),) * devices


def tiers(devices: int, seed: int) -> tuple[DeviceProfile, ...]:
    """Devices with compute times 1 : 2 : 4 : 8, in numbers 3 : 3 : 2 : 2, in random order.

    PrivaAsyncFed, experimental setup, "Simulation of Device Heterogeneity".
    """
    by_tier = [
        DeviceProfile(
            seconds_per_example=TIER_SECONDS_PER_EXAMPLE * slowness,
            seconds_per_task=TIER_SECONDS_PER_TASK * slowness,
            down=TIER_DOWN,
            up=TIER_UP,
            latency=TIER_LATENCY,
            group=name,
        )
        for name, _, slowness in TIERS
    ]
    counts = apportion(devices, [weight for _, weight, _ in TIERS])
    order = stream_rng(seed, RandomStream.TIERS).permutation(
        np.repeat(np.arange(len(TIERS)), counts)
    )
    return tuple(by_tier[tier] for tier in order.tolist())


def gamma(devices: int, seed: int) -> tuple[DeviceProfile, ...]:
    """Devices whose seconds per example follow a Gamma of shape 2 and mean 0.1; ideal links."""
    rng = stream_rng(seed, RandomStream.GAMMA)
    drawn = rng.gamma(GAMMA_SHAPE, GAMMA_MEAN / GAMMA_SHAPE, devices)
    return tuple(DeviceProfile(seconds_per_example=seconds) for seconds in drawn.tolist())


@dataclass(frozen=True, slots=True)
class Preset:
    """A named fleet: `build(devices, seed, path)` returns profiles and messages to the user.

    A trace may return another number of profiles than `devices`.
    """

    name: str
    summary: str
    build: Callable[[int, int, str], tuple[tuple[DeviceProfile, ...], tuple[str, ...]]]


PROFILES: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "uniform",
            "every task takes 10 s; devices are late by fleet.late only (the papers' setting)",
            lambda devices, seed, path: (uniform(devices), ()),
        ),
        Preset(
            "tiers",
            "fast, medium-fast, medium-slow and slow devices in 3:3:2:2 (PrivaAsyncFed)",
            lambda devices, seed, path: (tiers(devices, seed), ()),
        ),
        Preset(
            "gamma",
            "compute time per example Gamma-distributed over the devices",
            lambda devices, seed, path: (gamma(devices, seed), ()),
        ),
        Preset(
            "phones",
            "phones, Raspberry Pis and wearables on Wi-Fi, 4G and 3G, some only at night",
            lambda devices, seed, path: (phones(devices, seed), ()),
        ),
        Preset(
            "trace",
            "device profiles from fleet.path: a CSV file, or FedScale's or FLASH's folder",
            lambda devices, seed, path: read_trace(path),
        ),
    )
}

"""Independent random streams of the fleet, one per purpose."""

from enum import IntEnum

import numpy as np


class RandomStream(IntEnum):
    """Stream numbers by purpose; changing one changes every run."""

    TASK = 0xF1EE01
    LATE = 0xF1EE02
    TIERS = 0xF1EE03
    GAMMA = 0xF1EE04
    PHONES = 0xF1EE05
    ATTACK = 0xF1EE06


def stream_rng(seed: int, stream: RandomStream, *indices: int) -> np.random.Generator:
    """The generator seeded by the run's seed, the purpose, and e.g. device and task number."""
    return np.random.default_rng([seed, int(stream), *indices])

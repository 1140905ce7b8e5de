"""How wide a model each device carries, by what its hardware declares."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import repeat
from math import lcm

from latecomer.errors import BadInput
from latecomer.fleet.shares import apportion


def widths_by_speed(
    costs: Sequence[float], widths: Sequence[float], shares: Sequence[float]
) -> list[float]:
    """Each device's width: the fastest get the widest, in proportion to `shares`.

    `costs` are the devices' nominal task times; of two alike, the first counts as the faster one.
    PrivaAsyncFed, section III.A.
    """
    if len(widths) != len(shares):
        raise BadInput(f"{len(shares)} shares for {len(widths)} widths: each width needs one")
    if min(shares, default=0) < 0 or not any(shares):
        raise BadInput(f"shares {_listed(shares)}: must be 0 or more, and one of them above 0")
    table = sorted(zip(widths, _integers(shares), strict=True), reverse=True)
    counts = apportion(len(costs), [share for _, share in table])
    fastest_first = sorted(range(len(costs)), key=lambda device: costs[device])
    given = [w for (width, _), n in zip(table, counts, strict=True) for w in repeat(width, n)]
    found = dict(zip(fastest_first, given, strict=True))
    return [found[device] for device in range(len(costs))]


def _integers(shares: Sequence[float]) -> list[int]:
    """Whole numbers in the same proportions: 0.3 and 0.2 are 3 to 2, as they were meant."""
    exact = [Fraction(share).limit_denominator(10**6) for share in shares]
    common = lcm(*(share.denominator for share in exact))
    return [int(share * common) for share in exact]


def _listed(values: Sequence[float]) -> str:
    return " : ".join(f"{value:g}" for value in values)

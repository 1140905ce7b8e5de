"""Sub-model widths by hardware speed: faster devices train wider sub-models."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import repeat
from math import lcm

from latecomer.errors import BadInput


def widths_by_speed(
    task_seconds: Sequence[float], widths: Sequence[float], shares: Sequence[float]
) -> list[float]:
    """The sub-model width of each device: `shares[i]` of the fleet, fastest first, get `widths[i]`.

    Widths are assigned in descending order. Of devices with equal nominal task times the one with
    the lower id counts as faster. PrivaAsyncFed, section III.A.
    """
    if len(widths) != len(shares):
        raise BadInput(f"{len(shares)} shares for {len(widths)} widths: each width needs one")
    if min(shares, default=0) < 0 or not any(shares):
        raise BadInput(f"shares {_listed(shares)}: must be 0 or more, and one of them above 0")
    table = sorted(zip(widths, _integers(shares), strict=True), reverse=True)
    counts = apportion(len(task_seconds), [share for _, share in table])
    fastest_first = sorted(range(len(task_seconds)), key=lambda device: task_seconds[device])
    descending = [w for (width, _), n in zip(table, counts, strict=True) for w in repeat(width, n)]
    by_device = dict(zip(fastest_first, descending, strict=True))
    return [by_device[device] for device in range(len(task_seconds))]


def _integers(shares: Sequence[float]) -> list[int]:
    """Integers in the same proportions: 0.3 and 0.2 become 3 and 2, without rounding error."""
    exact = [Fraction(share).limit_denominator(10**6) for share in shares]
    common = lcm(*(share.denominator for share in exact))
    return [int(share * common) for share in exact]


def _listed(values: Sequence[float]) -> str:
    return " : ".join(f"{value:g}" for value in values)


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Integers with sum `total` in proportion to `weights`, by the largest-remainder method.

    Of equal remainders the first is rounded up.
    """
    weight_sum = sum(weights)
    parts = [total * weight // weight_sum for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % weight_sum))
    for position in by_remainder[: total - sum(parts)]:
        parts[position] += 1
    return tuple(parts)

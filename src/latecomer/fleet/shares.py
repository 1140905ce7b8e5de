"""Apportionment: an integer split in proportion to weights."""

from collections.abc import Sequence


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

"""A whole split into integer parts."""

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Parts in proportion to the weights, by largest remainder; ties to the first."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for position in by_remainder[: total - sum(parts)]:
        parts[position] += 1
    return tuple(parts)

"""A share of a number, rounded up to a whole number."""

import math


def quota(share: float, count: int) -> int:
    """ceil(share * count), at least 1."""
    # 0.07 * 100 is slightly above 7 in floating point; the result must be 7.
    return max(1, math.ceil(share * count - 1e-9))

"""How many a share of a number is."""

import math


def quota(share: float, count: int) -> int:
    """The least whole number that is `share` of `count` or more; at least 1."""
    # 0.07 * 100 is a hair above 7 in floating point, and must count as 7.
    return max(1, math.ceil(share * count - 1e-9))

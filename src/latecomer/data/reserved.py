"""Classes that nobody holds but those who hold most of them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.partition import Indices

# Who keeps them, from the examples of each class on each device.
Holders = Callable[[NDArray[np.integer[Any]]], Collection[int]]


@dataclass(frozen=True)
class Reserved:
    """Ties data to devices where a partition by itself does not (`fleet.late.only`)."""

    classes: tuple[int, ...]
    holders: Holders

    def leave(self, shares: Sequence[Indices], y: NDArray[np.int64]) -> list[Indices]:
        """The shares without what only others hold."""
        known = int(y.max(initial=0)) + 1
        counts = np.stack([np.bincount(y[share], minlength=known) for share in shares])
        holders = self.holders(counts)
        return [
            share if device in holders else share[~np.isin(y[share], self.classes)]
            for device, share in enumerate(shares)
        ]

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
class ExclusiveClasses:
    """Ties data to devices where a partition by itself does not (`fleet.late.only`)."""

    classes: tuple[int, ...]
    holders: Holders

    def restrict(
        self,
        shares: Sequence[Indices],
        y: NDArray[np.int64],
        num_classes: int,
        held_out: Collection[int] = (),
    ) -> tuple[list[Indices], tuple[int, ...]]:
        """The shares without what only others hold, and who these are.

        Devices that are held out to be tested on hold nothing in that sense, and keep everything.
        """
        counts = np.stack([np.bincount(y[share], minlength=num_classes) for share in shares])
        counts[list(held_out)] = 0
        keep = {*(holders := self.holders(counts)), *held_out}
        left = [
            share if device in keep else share[~np.isin(y[share], self.classes)]
            for device, share in enumerate(shares)
        ]
        return left, tuple(sorted(holders))

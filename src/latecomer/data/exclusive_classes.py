"""Removal of given classes from all devices except chosen holders (`fleet.late.only`)."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.data.stored import Indices

# Class counts (devices, classes) -> ids of the devices that keep the exclusive classes.
ChooseHolders = Callable[[NDArray[np.integer[Any]]], Collection[int]]


@dataclass(frozen=True)
class ExclusiveClasses:
    """Labels whose examples only the devices chosen by `choose_holders` keep."""

    classes: tuple[int, ...]
    choose_holders: ChooseHolders

    def restrict(
        self,
        shares: Sequence[Indices],
        y: NDArray[np.int64],
        num_classes: int,
        held_out: Collection[int] = (),
    ) -> tuple[list[Indices], tuple[int, ...]]:
        """The shares after the removal of the classes from other devices, and the holders' ids.

        `shares` are row indices by device. Held-out test devices keep all their rows and are
        never holders.
        """
        counts = np.stack([np.bincount(y[share], minlength=num_classes) for share in shares])
        counts[list(held_out)] = 0
        keep = {*(holders := self.choose_holders(counts)), *held_out}
        restricted = [
            share if device in keep else share[~np.isin(y[share], self.classes)]
            for device, share in enumerate(shares)
        ]
        return restricted, tuple(sorted(holders))

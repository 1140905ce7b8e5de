"""Late devices: how they are chosen by their data, and the delay of their uploads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latecomer.errors import BadInput
from latecomer.fleet.random_streams import RandomStream, stream_rng

LateKind = Literal["in-flight", "busy"]
GAMMA_SHAPE = 2.0


@dataclass(frozen=True, slots=True)
class Lateness:
    """The delay in seconds that is added to every upload of a late device.

    "in-flight": the device works on its next task while its upload is under way.
    "busy": the device takes no task until its upload has arrived.
    With `gamma` the delay of each task is drawn from a Gamma of this mean and shape GAMMA_SHAPE
    (the papers give no shape; 2 is moderately skewed: standard deviation 0.71 of the mean).
    """

    kind: LateKind
    mean_seconds: float
    gamma: bool = False

    def extra_seconds(self, gamma_draw: float) -> float:
        """The delay of one task; `gamma_draw` is from the standard Gamma of shape GAMMA_SHAPE."""
        return self.mean_seconds * gamma_draw / GAMMA_SHAPE if self.gamma else self.mean_seconds


def lateness_from_epochs(
    kind: LateKind, delay: float, epoch_seconds: float, gamma: bool = False
) -> Lateness:
    """The lateness for a delay in epochs: constant, or with `gamma` the mean of a Gamma.

    A constant delay is shortened by half an epoch. An upload in time arrives on an epoch boundary;
    one that is late by whole epochs would arrive on a boundary too, where its staleness depends on
    the order of simultaneous events. In mid-epoch it is exactly `delay` on a uniform fleet.
    """
    if delay > 0 and epoch_seconds <= 0:
        raise BadInput(
            f"fleet.late.delay = {delay}: epochs take no time on this fleet; give its tasks a cost"
        )
    epochs = delay if gamma else max(0.0, delay - 0.5)
    return Lateness(kind, epochs * epoch_seconds, gamma)


def choose_late(
    class_counts: NDArray[np.integer[Any]], classes: Sequence[int], devices: int, seed: int
) -> tuple[int, ...]:
    """Ascending ids of the `devices` devices with the most examples of `classes`.

    `class_counts` is (devices, classes); of equal counts the lower id is chosen. Without classes:
    random devices that have data. Devices without an example of the classes are never chosen, so
    the result may be shorter.
    """
    if not classes:
        with_data = np.flatnonzero(class_counts.sum(axis=1))
        picked = stream_rng(seed, RandomStream.LATE).permutation(with_data)[:devices]
    else:
        held = class_counts[:, sorted(set(classes))].sum(axis=1)
        most_first = np.argsort(-held, kind="stable")
        picked = most_first[held[most_first] > 0][:devices]
    return tuple(sorted(picked.tolist()))

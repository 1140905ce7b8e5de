"""A task done in parts, so that a device can hear of a newer model between two of them."""

from dataclasses import dataclass

from torch import Tensor

from latecomer.device.optimizers import Memory


@dataclass(slots=True)
class Part:
    """Where a device stands in a task: it has done so many passes over its data.

    `choice` is the number of the model that it goes from, `left_for` that of the offer it began
    with (0: the task's own). `base` is that model, `local` what has become of it, `anchor` where
    training began or began anew, and `memory` the optimiser's since then.
    """

    choice: int
    left_for: int
    base: Tensor
    local: Tensor
    anchor: Tensor
    memory: Memory | None = None
    done: int = 0

    def take_up(self, number: int, newer: Tensor) -> None:
        """w <- w_new + (w_local - w_old); the optimiser begins anew."""
        self.local = newer + (self.local - self.base)
        self.choice, self.base, self.anchor, self.memory = number, newer, self.local, None

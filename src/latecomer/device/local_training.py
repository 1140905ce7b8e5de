"""The state of one task's local training, which can stop after any pass over the data and resume.

The simulation trains a task in one call, a deployed device in one message per pass; both advance
this state (`Client.start`, `Client.advance`), so a broadcast changes the update in the same way.
"""

from dataclasses import dataclass

from torch import Tensor

from latecomer.device.optimizers import OptimizerState


@dataclass(slots=True)
class LocalTraining:
    """Parameters and optimiser state of a task after `passes` of its passes over the data.

    `choice` is the number of the model that the delta is computed against (`base`), `started_from`
    the number of the offer that training started from (0: the task's own model). `params` are the
    trained parameters, `anchor` those at the start or at the last `rebase`, to which `spec.prox`
    pulls; `optimizer` is None until the first step after either.
    """

    choice: int
    started_from: int
    base: Tensor
    params: Tensor
    anchor: Tensor
    optimizer: OptimizerState | None = None
    passes: int = 0

    def accepts(self, offer: int) -> bool:
        """Whether to rebase on a broadcast of the lineage of this offer (0: of no offer).

        A device that started from an offer ignores broadcasts of every other lineage.
        """
        return self.started_from in (0, offer)

    def rebase(self, number: int, newer: Tensor) -> None:
        """w <- w_newer + (w - w_base), with a fresh optimiser; `newer` becomes the base."""
        self.params = newer + (self.params - self.base)
        self.choice, self.base, self.anchor, self.optimizer = number, newer, self.params, None

    @property
    def delta(self) -> Tensor:
        """Trained parameters minus the base."""
        return self.params - self.base

"""Early stopping: the best evaluation by validation macro-F1, and how long ago it was."""

from collections.abc import Mapping, Sequence
from typing import Any

from latecomer.study.metrics import Scores


class EarlyStopping:
    """Stops after `patience` evaluations without a higher validation macro-F1; 0 never stops."""

    def __init__(self, patience: int, kept: Sequence[str]) -> None:
        self.patience, self._kept = patience, kept
        self.best: dict[str, Any] | None = None  # the columns `kept` of the best evaluation
        self._since_best = 0  # evaluations

    @property
    def is_over(self) -> bool:
        return bool(self.patience) and self._since_best >= self.patience

    def record(self, row: Mapping[str, Any], found: Scores) -> dict[str, float]:
        """Compare an evaluation with the best; returns its validation columns."""
        seen = {"validation_loss": found.loss, "validation_macro_f1": found.macro_f1}
        if self.best is None or found.macro_f1 > self.best["validation_macro_f1"]:
            self.best = {name: row[name] for name in self._kept} | seen
            self._since_best = 0
        else:
            self._since_best += 1
        return seen

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "since_best": self._since_best}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self._since_best = state["best"], state["since_best"]

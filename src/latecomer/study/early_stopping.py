"""Early stopping: the best evaluation by a validation metric, and how long ago it was."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from latecomer.core.strategy import Stateful
from latecomer.study.metrics import Scores


class EarlyStopping(Stateful):
    """Stops after `patience` evaluations without a better validation `metric`; 0 never stops."""

    kept = ("best", "_since_best")

    def __init__(
        self,
        patience: int,
        columns: Sequence[str],
        metric: str = "macro_f1",
        lower_is_better: bool = False,
    ) -> None:
        self.patience, self._columns = patience, columns
        self.metric, self._sign = metric, -1.0 if lower_is_better else 1.0
        self.best: dict[str, Any] | None = None  # these columns of the best evaluation
        self._since_best = 0  # evaluations

    @property
    def is_over(self) -> bool:
        return bool(self.patience) and self._since_best >= self.patience

    def record(self, row: Mapping[str, Any], found: Scores) -> dict[str, float | None]:
        """Compare an evaluation with the best; returns its validation columns."""
        column = f"validation_{self.metric}"
        seen = {"validation_loss": found["loss"], column: found[self.metric]}
        if self.best is None or self._value(seen[column]) > self._value(self.best[column]):
            self.best = {name: row[name] for name in self._columns} | seen
            self._since_best = 0
        else:
            self._since_best += 1
        return seen

    def _value(self, score: float | None) -> float:
        """The score, negated if lower is better; below all others if it is unknown."""
        return -math.inf if score is None or math.isnan(score) else self._sign * score

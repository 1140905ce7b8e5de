"""What a decision changes: differences to the base run of the same seed, and their spread."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from latecomer.study.har.plan import BASE

SMALLEST = 0.005  # half a point: less than that matters to nobody

# Two-sided 95% quantiles of Student's t by degrees of freedom; past them the normal one.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL = 1.96


@dataclass(frozen=True)
class Effect:
    """The mean of paired differences over seeds, and half the width of its 95% interval."""

    mean: float
    std: float
    half: float
    seeds: int

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval excludes 0 and the effect is worth a word; else 0."""
        clear = abs(self.mean) > self.half and abs(self.mean) >= SMALLEST
        return int(math.copysign(1, self.mean)) if clear else 0

    @property
    def reversed(self) -> "Effect":
        """The same change the other way round."""
        return Effect(-self.mean, self.std, self.half, self.seeds)

    @property
    def small(self) -> bool:
        """Whether the interval lies within what matters to nobody."""
        return abs(self.mean) + self.half < SMALLEST

    @property
    def backs(self) -> int:
        """Whether it backs the claim of a gain: +1; refutes it, by a loss or no gain: -1; or 0."""
        if self.sign:
            return self.sign
        return -1 if self.mean + self.half < SMALLEST else 0

    def __str__(self) -> str:
        spread = f" ± {self.std:.3f}" if self.seeds > 1 else ""
        return f"{self.mean:+.3f}{spread}"


def paired(differences: Sequence[float]) -> Effect:
    """The effect from one difference per seed; with a single one nothing is certain."""
    series = pd.Series(list(differences), dtype=float).dropna()
    n = len(series)
    if n == 0:
        return Effect(math.nan, math.nan, math.inf, 0)
    std = float(series.std()) if n > 1 else math.nan
    quantile = STUDENT[n - 2] if 2 <= n <= len(STUDENT) + 1 else NORMAL
    half = quantile * std / math.sqrt(n) if n > 1 else math.inf
    return Effect(float(series.mean()), std, half, n)


def effect(
    table: pd.DataFrame,
    paradigm: str,
    factor: str,
    value: str,
    column: str = "macro_f1",
    against: tuple[str, str] = (BASE, ""),
) -> Effect | None:
    """What changing `factor` to `value` does to the runs `against`; None if it was not run."""
    changed = by_seed(table, paradigm, factor, value, column)
    if changed.empty:
        return None
    return paired((changed - by_seed(table, paradigm, *against, column)).tolist())


def by_seed(
    table: pd.DataFrame, paradigm: str, factor: str, value: str, column: str
) -> "pd.Series[float]":
    """A column of the runs with this one thing changed, by seed."""
    chosen = (
        (table["paradigm"] == paradigm)
        & (table["factor"] == factor)
        & (table["value"].astype(str) == value)
    )
    return table[chosen].set_index("seed")[column]

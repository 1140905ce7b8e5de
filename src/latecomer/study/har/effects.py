"""Effects of decisions: paired differences over seeds with a 95% confidence interval."""

import math
from dataclasses import dataclass

import pandas as pd

MIN_EFFECT = 0.005  # smaller differences of a score are negligible

# Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the normal.
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class Effect:
    """Mean and standard deviation of paired differences, and the 95% interval of the mean."""

    mean: float
    std: float
    half_width: float  # of the interval
    seeds: int

    @property
    def sign(self) -> int:
        """+1 or -1 if the interval excludes 0 and |mean| >= MIN_EFFECT, else 0."""
        clear = abs(self.mean) > self.half_width and abs(self.mean) >= MIN_EFFECT
        return int(math.copysign(1, self.mean)) if clear else 0

    @property
    def negligible(self) -> bool:
        """Whether the interval lies within ±MIN_EFFECT."""
        return abs(self.mean) + self.half_width < MIN_EFFECT

    @property
    def supports_gain(self) -> int:
        """Evidence for a gain: +1 if clear, -1 if refuted (a clear loss or no gain), else 0."""
        if self.sign:
            return self.sign
        return -1 if self.mean + self.half_width < MIN_EFFECT else 0

    def __str__(self) -> str:
        spread = f" ± {self.std:.3f}" if self.seeds > 1 else ""
        return f"{self.mean:+.3f}{spread}"


def paired(differences: "pd.Series[float]") -> Effect:
    """The effect from one difference per seed; the interval of a single seed is infinite."""
    series = differences.dropna()
    n = len(series)
    if n == 0:
        return Effect(math.nan, math.nan, math.inf, 0)
    std = float(series.std()) if n > 1 else math.nan
    quantile = T_QUANTILES[n - 2] if 2 <= n <= len(T_QUANTILES) + 1 else NORMAL_QUANTILE
    half_width = quantile * std / math.sqrt(n) if n > 1 else math.inf
    return Effect(float(series.mean()), std, half_width, n)

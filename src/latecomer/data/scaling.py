"""Exact statistics of data that stay apart, and scaling by them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import feature_axis

Floats = NDArray[np.float64]

# A spread this far below the mean is rounding, not signal: the feature is constant.
CONSTANT = 1e-12


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """Per feature: observed values, their mean, and the sum of squared distances from it.

    A feature is a column of a table, or a channel of a series or an image. All three are zero
    where nothing was observed.
    """

    count: Floats
    mean: Floats
    m2: Floats

    @property
    def std(self) -> Floats:
        """The spread to divide by: 1 where the feature is constant or unobserved."""
        std = np.sqrt(self.m2 / np.maximum(self.count, 1))
        return np.where(std > CONSTANT * np.abs(self.mean), std, 1.0)

    def where_unobserved(self, other: "FeatureMoments") -> "FeatureMoments":
        """These moments, with those of `other` for features that were never observed."""
        seen = self.count > 0
        return FeatureMoments(
            count=np.where(seen, self.count, other.count),
            mean=np.where(seen, self.mean, other.mean),
            m2=np.where(seen, self.m2, other.m2),
        )


def moments(x: NDArray[np.float32]) -> FeatureMoments:
    """The moments of each feature of `x`, missing values left out."""
    axes = tuple(a for a in range(x.ndim) if a != feature_axis(x.ndim))
    seen = ~np.isnan(x)
    count = seen.sum(axis=axes, dtype=np.float64)
    total = x.sum(axis=axes, dtype=np.float64, where=seen)
    mean = total / np.maximum(count, 1)
    m2 = np.square(x - _along(mean, x.ndim)).sum(axis=axes, where=seen)
    return FeatureMoments(count, mean, m2)


def pool(parts: Iterable[FeatureMoments]) -> FeatureMoments:
    """The moments of all parts together, from their moments alone.

    T. F. Chan, G. H. Golub, R. J. LeVeque. Updating formulae and a pairwise algorithm for
    computing sample variances. COMPSTAT, 1982.
    """
    first, *others = parts
    count, mean, m2 = first.count, first.mean, first.m2
    for part in others:
        both = count + part.count
        weight = part.count / np.maximum(both, 1)
        delta = part.mean - mean
        mean = mean + delta * weight
        m2 = m2 + part.m2 + delta**2 * count * weight
        count = both
    return FeatureMoments(count, mean, m2)


def impute(x: NDArray[np.float32], by: FeatureMoments) -> NDArray[np.float32]:
    """`x` with every missing value replaced by the mean of its feature."""
    filled = np.where(np.isnan(x), _along(by.mean, x.ndim), x)
    return filled.astype(np.float32)


def standardise(x: NDArray[np.float32], by: FeatureMoments) -> NDArray[np.float32]:
    """`x` with mean 0 and standard deviation 1 per feature, a missing value at the mean."""
    scaled = (x - _along(by.mean, x.ndim)) / _along(by.std, x.ndim)
    # A missing value is at the mean, and the mean is now 0.
    return np.nan_to_num(scaled, copy=False, nan=0.0).astype(np.float32)


def _along(values: Floats, ndim: int) -> Floats:
    shape = [1] * ndim
    shape[feature_axis(ndim)] = -1
    return values.reshape(shape)

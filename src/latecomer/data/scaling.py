"""Per-feature mean and variance, pooled exactly over devices, and standardisation by them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import feature_axis

Floats = NDArray[np.float64]

# A feature whose std is below this share of its mean is constant up to rounding.
MIN_RELATIVE_STD = 1e-12


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """Per feature: number of observed values, their mean, and sum of squared deviations from it.

    A feature is a column of a table, or a channel of a series or an image. All three are zero
    for a feature without observed values.
    """

    count: Floats
    mean: Floats
    m2: Floats

    @property
    def std(self) -> Floats:
        """The standard deviation; 1 where the feature is constant or unobserved."""
        std = np.sqrt(self.m2 / np.maximum(self.count, 1))
        return np.where(std > MIN_RELATIVE_STD * np.abs(self.mean), std, 1.0)

    def filled_from(self, other: "FeatureMoments") -> "FeatureMoments":
        """These moments, with those of `other` for features without observed values."""
        observed = self.count > 0
        return FeatureMoments(
            count=np.where(observed, self.count, other.count),
            mean=np.where(observed, self.mean, other.mean),
            m2=np.where(observed, self.m2, other.m2),
        )


def moments(x: NDArray[np.float32]) -> FeatureMoments:
    """The moments of each feature of `x`, without missing values."""
    axes = tuple(a for a in range(x.ndim) if a != feature_axis(x.ndim))
    observed = ~np.isnan(x)
    count = observed.sum(axis=axes, dtype=np.float64)
    total = x.sum(axis=axes, dtype=np.float64, where=observed)
    mean = total / np.maximum(count, 1)
    m2 = np.square(x - _broadcast(mean, x.ndim)).sum(axis=axes, where=observed)
    return FeatureMoments(count, mean, m2)


def pool(parts: Iterable[FeatureMoments]) -> FeatureMoments:
    """The moments of the union of all parts, computed from the moments of the parts.

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
    filled = np.where(np.isnan(x), _broadcast(by.mean, x.ndim), x)
    return filled.astype(np.float32)


def standardise(x: NDArray[np.float32], by: FeatureMoments) -> NDArray[np.float32]:
    """(x - mean) / std per feature, with the moments `by`; missing values become 0, the mean."""
    scaled = (x - _broadcast(by.mean, x.ndim)) / _broadcast(by.std, x.ndim)
    return np.nan_to_num(scaled, copy=False, nan=0.0).astype(np.float32)


def _broadcast(values: Floats, ndim: int) -> Floats:
    """One value per feature, reshaped to broadcast against an array of `ndim` axes."""
    shape = [1] * ndim
    shape[feature_axis(ndim)] = -1
    return values.reshape(shape)

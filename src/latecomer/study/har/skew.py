"""Label counts per device, and feature skew: variance of a class between devices."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.federated_dataset import ClientData, FederatedDataset

MIN_EXAMPLES = 5  # of a class on a device, for the device to count as a group


@dataclass(frozen=True)
class Skew:
    """The share of the variance within a class that lies between devices (omega squared).

    0: equally distributed on all devices. Omega squared is corrected for chance, so the
    uncertain means of a rare class do not count as skew.
    """

    by_class: Mapping[str, float]  # mean over features
    by_feature: NDArray[np.float64]  # (classes, features)


def label_counts(federation: FederatedDataset) -> pd.DataFrame:
    """Examples of each class (columns) on each device (rows), without augmentation's replicas."""
    rows = []
    for client in federation.clients:
        train = client.train.y.numpy()[_originals(client)]
        labels = np.concatenate([train, client.validation.y.numpy(), client.test.y.numpy()])
        rows.append(np.bincount(labels, minlength=federation.num_classes))
    return pd.DataFrame(rows, columns=list(federation.class_names))


def feature_skew(federation: FederatedDataset) -> Skew:
    """One-way analysis of variance of every feature within every class, devices as groups.

    Uses the training parts without replicas. Features of a series are the mean and standard
    deviation of each channel of a window, those of an image its pixels.
    """
    features = _features(federation.clients[0]).shape[1]
    labels = range(federation.num_classes)
    groups = [list(by_device(federation, label, slice(None)).values()) for label in labels]
    table = np.stack([omega_squared(group, features) for group in groups])
    means = pd.DataFrame(table).mean(axis=1)  # without nan; nan if there is nothing else
    return Skew(dict(zip(federation.class_names, means.tolist(), strict=True)), table)


def omega_squared(groups: list[NDArray[np.float32]], features: int) -> NDArray[np.float64]:
    """Each feature's share of variance between groups: (SSB - (k - 1) MSW) / (SST + MSW), >= 0.

    NaN for fewer than two groups and for a constant feature.
    """
    if len(groups) < 2:
        return np.full(features, np.nan)
    x = np.concatenate(groups).astype(np.float64)
    n, k = len(x), len(groups)
    mean = x.mean(axis=0)
    total = np.square(x - mean).sum(axis=0)
    between = sum(len(g) * np.square(g.mean(axis=0, dtype=np.float64) - mean) for g in groups)
    within = (total - between) / (n - k)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (between - (k - 1) * within) / (total + within)
    constant = total <= 1e-9 * n
    return np.where(constant, np.nan, np.clip(share, 0.0, 1.0))


def _originals(client: ClientData) -> NDArray[np.int64]:
    """Indices of the training examples that are not replicas."""
    index: NDArray[np.int64] = np.unique(client.train_rows.numpy(), return_index=True)[1]
    return index


def _features(client: ClientData) -> NDArray[np.float32]:
    """(n, features) of the training examples without replicas; see `feature_skew`."""
    x = client.train.x.numpy()[_originals(client)]
    if x.ndim == 3:
        return np.concatenate([x.mean(axis=1), x.std(axis=1)], axis=1)
    return x.reshape(len(x), -1)


def most_skewed(federation: FederatedDataset, skew: Skew, label: int) -> int | None:
    """The feature of a class with the largest skew, of those with MIN_EXAMPLES distinct values."""
    groups = by_device(federation, label, slice(None))
    order = np.argsort(-np.nan_to_num(skew.by_feature[label], nan=-1.0))
    for feature in order.tolist():
        if groups and min(len(np.unique(x[:, feature])) for x in groups.values()) >= MIN_EXAMPLES:
            return int(feature)
    return None


def by_device(
    federation: FederatedDataset, label: int, feature: int | slice
) -> dict[int, NDArray[np.float32]]:
    """Device -> values of a feature (or several) of a class, if it has MIN_EXAMPLES of it."""
    groups = {}
    for device, client in enumerate(federation.clients):
        y = client.train.y.numpy()[_originals(client)]
        values = _features(client)[y == label, feature]
        if len(values) >= MIN_EXAMPLES:
            groups[device] = values
    return groups

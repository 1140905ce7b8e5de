"""How unlike the devices are: who has which classes, and how differently one class looks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latecomer.data.federated_dataset import ClientData, FederatedDataset

ENOUGH = 5  # examples of a class that a device needs to say how the class looks there


@dataclass(frozen=True)
class Skew:
    """The share of a class's variance that lies between devices, mean over features.

    0: the class looks alike everywhere. It is corrected for chance (omega squared), so that a
    rare class does not look skewed only because its means are uncertain.
    """

    by_class: Mapping[str, float]
    by_feature: NDArray[np.float64]  # (classes, features)
    devices: Mapping[str, int]  # with enough examples of each class


def label_counts(federation: FederatedDataset) -> pd.DataFrame:
    """Examples of each class (columns) on each device, replicas of augmentation not counted."""
    rows = []
    for client in federation.clients:
        own = client.train.y.numpy()[_originals(client)]
        labels = np.concatenate([own, client.validation.y.numpy(), client.test.y.numpy()])
        rows.append(np.bincount(labels, minlength=federation.num_classes))
    return pd.DataFrame(rows, columns=list(federation.class_names))


def feature_skew(federation: FederatedDataset) -> Skew:
    """One-way analysis of variance of every feature within every class, devices as groups.

    Originals of the training parts. A series counts with the mean and deviation of each channel
    in each window, an image with its pixels.
    """
    originals = [_originals(client) for client in federation.clients]
    both = list(zip(federation.clients, originals, strict=True))
    parts = [_described(client.train.x.numpy()[rows]) for client, rows in both]
    labels = [client.train.y.numpy()[rows] for client, rows in both]
    by_feature, devices = [], {}
    for label, name in enumerate(federation.class_names):
        groups = [x[y == label] for x, y in zip(parts, labels, strict=True)]
        groups = [group for group in groups if len(group) >= ENOUGH]
        devices[name] = len(groups)
        by_feature.append(omega_squared(groups, parts[0].shape[1]))
    table = np.stack(by_feature)
    return Skew(
        {name: _mean(row) for name, row in zip(federation.class_names, table, strict=True)},
        table,
        devices,
    )


def omega_squared(groups: list[NDArray[np.float32]], features: int) -> NDArray[np.float64]:
    """The share of variance between groups, for each feature; NaN where there is nothing to tell.

    (SSB - (k - 1) MSW) / (SST + MSW), at least 0.
    """
    if len(groups) < 2:
        return np.full(features, np.nan)
    everything = np.concatenate(groups).astype(np.float64)
    n, k = len(everything), len(groups)
    mean = everything.mean(axis=0)
    total = np.square(everything - mean).sum(axis=0)
    between = sum(len(g) * np.square(g.mean(axis=0, dtype=np.float64) - mean) for g in groups)
    within = (total - between) / (n - k)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (between - (k - 1) * within) / (total + within)
    constant = total <= 1e-9 * n
    return np.where(constant, np.nan, np.clip(share, 0.0, 1.0))


def _originals(client: ClientData) -> NDArray[np.int64]:
    """Where the training examples stand that are no replicas of others."""
    places: NDArray[np.int64] = np.unique(client.train_rows.numpy(), return_index=True)[1]
    return places


def _described(x: NDArray[np.float32]) -> NDArray[np.float32]:
    if x.ndim == 3:
        return np.concatenate([x.mean(axis=1), x.std(axis=1)], axis=1)
    return x.reshape(len(x), -1)


def most_skewed(federation: FederatedDataset, skew: Skew, label: int) -> int | None:
    """The feature of a class that differs most between devices; flags and the like left out."""
    seen = by_device(federation, label, slice(None))
    order = np.argsort(-np.nan_to_num(skew.by_feature[label], nan=-1.0))
    for feature in order.tolist():
        if seen and min(len(np.unique(x[:, feature])) for x in seen.values()) >= ENOUGH:
            return int(feature)
    return None


def by_device(
    federation: FederatedDataset, label: int, feature: int | slice
) -> dict[int, NDArray[np.float32]]:
    """One feature (or several) of one class on each device that has enough examples of it."""
    found = {}
    for device, client in enumerate(federation.clients):
        rows = _originals(client)
        x = _described(client.train.x.numpy()[rows])
        values = x[client.train.y.numpy()[rows] == label, feature]
        if len(values) >= ENOUGH:
            found[device] = values
    return found


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")

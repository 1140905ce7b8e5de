"""What `Clustering` keeps of each device and of each cluster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import MAIN

DevicesByLineage = Mapping[str, Sequence[int]]


@portable
@dataclass(slots=True)
class MemberState:
    """One device: what it last reported about the model on its data, and its uploads."""

    error: float = math.nan
    mean_prediction: Tensor | None = None  # mean soft label
    uploads: int = 0
    offered_at: int = 0  # its upload at which it was last offered all models
    offer_task: int = -1  # the task with that offer
    offered: tuple[str, ...] = ()  # the lineages offered
    reports_losses: bool = True  # False for private devices
    losses: dict[str, float] = field(default_factory=dict)  # lineage -> loss on the device's data


@portable
@dataclass(slots=True)
class ClusterState:
    """One lineage: its history of reviews, and the device that seeded it."""

    merges: int = 0  # uploads since its last review
    best: float = math.inf  # the smallest median error so far
    stuck: int = 0  # reviews since
    resting: int = 0  # reviews before it may be split
    rest: int = 1  # length of its next pause, in reviews
    seed_device: int = -1
    seeded_at: int = 0  # uploads of its seed device when it was started
    parent: str = MAIN
    fresh: bool = False  # only the output layer is trained
    open: bool = True  # whether other devices are offered its model


def is_distribution(values: Sequence[float]) -> bool:
    """Whether these are probabilities of two classes or more that sum to 1."""
    return len(values) > 1 and min(values) >= 0 and abs(sum(values) - 1) < 1e-3


def per_class(metrics: Mapping[str, float], name: str) -> list[float]:
    """The metrics `name`_0, `name`_1, ... of an update, as many as there are."""
    return [metrics[f"{name}_{j}"] for j in range(len(metrics)) if f"{name}_{j}" in metrics]

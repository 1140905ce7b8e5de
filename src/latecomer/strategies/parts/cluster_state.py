"""What is known of a device that belongs to a cluster, and of a cluster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from latecomer.core.messages import MAIN

Homes = Mapping[str, Sequence[int]]  # lineage -> the devices that use it


@dataclass(slots=True)
class Member:
    """What is known of a device: its last judgement, of which classes it told, and its uploads."""

    judgement: float = math.nan
    soft: Tensor | None = None
    uploads: int = 0
    asked: int = 0  # the upload at which it was last asked where it belongs
    question: int = -1  # the task it was asked with
    offered: tuple[str, ...] = ()  # what it has to choose from
    answers: bool = True  # whether it tells its loss when it is asked; a private one does not
    fits: dict[str, float] = field(default_factory=dict)  # its loss on each of them
    recent: list[float] = field(default_factory=list)  # its last judgements
    share: Tensor | None = None  # of each class, and how the outputs give way: both or neither
    sway: Tensor | None = None


@dataclass(slots=True)
class Cluster:
    """What is known of a lineage."""

    merges: int = 0  # since it was last refined
    best: float = math.inf  # the lowest median judgement so far
    stuck: int = 0  # refinements since
    resting: int = 0  # refinements before it may be divided
    rest: int = 1  # how long the next rest is
    founder: int = -1  # who began it
    founded: int = 0  # and after how many uploads
    parent: str = MAIN
    fresh: bool = False  # only the output layer is trained
    open: bool = True  # whether others are asked to join it


def is_distribution(values: Sequence[float]) -> bool:
    """Whether these can be the mean soft label of a device, or its shares of classes."""
    return len(values) > 1 and min(values) >= 0 and abs(sum(values) - 1) < 1e-3


def per_class(metrics: Mapping[str, float], name: str) -> list[float]:
    """What a device tells of each class under this name, as far as there are numbers in a row."""
    return [metrics[f"{name}_{j}"] for j in range(len(metrics)) if f"{name}_{j}" in metrics]


def finite(values: Sequence[Any]) -> list[Any]:
    """The same with words for numbers that JSON cannot say."""
    return [str(v) if isinstance(v, float) and not math.isfinite(v) else v for v in values]


def numbers(values: Sequence[Any]) -> list[Any]:
    """`finite` undone."""
    return [float(v) if v in ("nan", "inf", "-inf") else v for v in values]

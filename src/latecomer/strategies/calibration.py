"""By how much the outputs of a model are to be moved so that it says each class as often as it is.

Devices that hold few classes unlearn the others with every step, and what all of them agree on says
too seldom what few hold: most of all what comes late. Devices tell how often they have each class
and how often the model says it, on average; one Newton step on the intercepts closes the gap (of
old "calibration in the large"; Luo et al. 2021 calibrate classifiers after federated training).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from latecomer.strategies.roll_call import HEAVIEST

STIFF = 5.0  # examples' worth of trust in the outputs as they are
FARTHEST = 2.0  # nats: no output is moved by more


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What a device tells of a model on its `examples`, per class."""

    examples: float
    soft: Tensor  # how often the model says it: the mean soft label p
    share: Tensor  # how often it is
    sway: Tensor  # by how much one nat more would change what is said: the mean of p (1 - p)


def skew(judged: Sequence[Judged]) -> float:
    """How differently classes are spread over devices: 0 as by chance, 1 with one class on each.

    The variance of the shares beside the largest there could be, without the part that comes of
    counting few examples.
    """
    shares = torch.stack([each.share for each in judged])
    mean = shares.mean(0)
    largest = (mean * (1 - mean)).sum().item()
    if largest <= 0:
        return 0.0
    found = shares.var(0, correction=0).sum().item() / largest
    chance = sum(1 / max(1.0, each.examples) for each in judged) / len(judged)
    return max(0.0, (found - chance) / (1 - chance)) if chance < 1 else 0.0


def offsets(judged: Sequence[Judged]) -> Tensor:
    """What is to be added to the outputs, as far as the fault is that of skewed devices."""
    most = HEAVIEST * median(each.examples for each in judged)
    weights = [min(each.examples, most) for each in judged]
    total = sum(weights)
    lack, sway = torch.zeros(2, len(judged[0].soft), dtype=torch.float64)
    for weight, each in zip(weights, judged, strict=True):
        lack += weight / total * (each.share - each.soft)
        sway += weight / total * each.sway
    moved: Tensor = (lack / (sway + STIFF / total)).clamp(-FARTHEST, FARTHEST)
    return (moved - moved.mean()) * skew(judged)

"""By how much the outputs of a model are to be moved so that it says each class as often as it is.

Devices that hold few classes unlearn the others with every step, and what all of them agree on says
too seldom what few hold: most of all what comes late. Devices tell how often they have each class
and how often the model says it, on average; one step of Newton's on the intercepts closes the gap
(of old "calibration in the large"; Luo et al. 2021 calibrate classifiers after federated training).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

LOUDEST = 2.0  # times the usual number of examples: nobody counts for more
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
    """What is to be added to the outputs so that the model says each class as often as it is.

    The second derivative is taken by its diagonal, which alone would go too far by 1 / (K - 1) of
    the way where K classes are mistaken for each other evenly.
    """
    usual = median(each.examples for each in judged)
    weights = torch.tensor([min(each.examples, LOUDEST * usual) for each in judged]).double()
    total, classes = weights.sum(), len(judged[0].soft)
    lack = weights @ torch.stack([each.share - each.soft for each in judged]) / total
    sway = weights @ torch.stack([each.sway for each in judged]) / total
    moved: Tensor = (classes - 1) / classes * lack / (sway + STIFF / total)
    return (moved - moved.mean()).clamp(-FARTHEST, FARTHEST)

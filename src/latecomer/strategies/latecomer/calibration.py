"""By how much the outputs of a model are to be moved so that it says each class as often as it is.

Devices that lack a class unlearn it with every step, and what all of them agree on says too seldom
what few hold: most of all what comes late. Devices tell how often they have each class
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
TINY = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What a device tells of a model on its `examples`, per class."""

    examples: float
    soft: Tensor  # how often the model says it: the mean soft label p
    share: Tensor  # how often it is
    sway: Tensor  # by how much one nat more would change what is said: the mean of p (1 - p)


def unevenness(judged: Sequence[Judged]) -> Tensor:
    """For each class, 0 if devices differ by chance only, 1 if it is all that some have.

    The part of it that would have to move so that all have the same share of it (Hoover's index),
    beside the largest there could be, without what comes of counting few examples.
    """
    shares = torch.stack([each.share for each in judged]).double()
    counts = torch.tensor([max(1.0, each.examples) for each in judged]).double().floor()
    mean = shares.mean(0)
    found = torch.zeros_like(mean)
    some = (mean > 0) & (mean < 1)
    mean, shares = mean[some], shares[:, some]
    most = mean * (1 - mean)
    uneven = (mean - shares).clamp_min(0.0).mean(0) / most
    drawn = (by_chance(counts[:, None], mean) / most).mean(0)
    # The mean is that of these devices, and so nearer to each of them than the truth.
    chance = drawn * ((len(judged) - 1) / len(judged)) ** 0.5
    over = (uneven - chance) / (1 - chance).clamp_min(TINY)
    # Of devices with one example each nothing is known.
    found[some] = torch.where(drawn < 1 - TINY, over.clamp(0.0, 1.0), 0.0)
    return found


def by_chance(n: Tensor, p: Tensor) -> Tensor:
    """By how much a share of n examples, each of this chance, falls short of it on average.

    Half of the mean distance from the mean (De Moivre 1730).
    """
    k = (n * p).floor() + 1
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + k.log() + k * p.log() + (n - k + 1) * (1 - p).log()).exp() / n


def offsets(judged: Sequence[Judged], factors: Tensor) -> Tensor:
    """What is to be added to the outputs so that the model says each class as often as it is.

    Each class is moved by its factor of that; those with 0 stay, and the others are moved against
    them. A step of Newton's by the diagonal of the second derivative, as if all K classes were
    mistaken for each other evenly. Where most are moved their mean stays: against the few that
    are not it would be little more than these few's noise.
    """
    usual = median(each.examples for each in judged)
    weights = torch.tensor([min(each.examples, LOUDEST * usual) for each in judged]).double()
    total, classes = weights.sum(), len(factors)
    lack = weights @ torch.stack([each.share - each.soft for each in judged]) / total
    sway = weights @ torch.stack([each.sway for each in judged]) / total
    alone, some = lack / (sway + STIFF / total), factors > 0
    moved = int(some.sum())
    against = -alone.mean() if 2 * moved > classes else alone[some].sum() / (classes - moved)
    step = (classes - 1) / classes * (alone + against)
    return factors * step.clamp(-FARTHEST, FARTHEST)

"""Metrics of outputs and targets, by kind of objective, and their summary over devices.

Targets that are missing (NaN, or negative tokens) are left out.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Metric = Callable[[Tensor, Tensor], float | None]  # of outputs and targets


@dataclass(frozen=True)
class Scores:
    """The metrics of one evaluation by name; None where the test set has no examples for it.

    `f1` has a value for each class or label, and is empty for other kinds of targets.
    """

    values: Mapping[str, float | None]
    f1: tuple[float | None, ...] = ()

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]


# Classes.


def confusion(targets: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """counts[i, j] = number of examples of class i that were predicted as class j."""
    flat = torch.bincount(targets * classes + predicted, minlength=classes * classes)
    return flat.view(classes, classes).double()


def class_scores(counts: Tensor, loss: float, late: Sequence[int] = ()) -> Scores:
    """The metrics of a confusion matrix; `accuracy_affected` is that on the classes `late`.

    As in scikit-learn, macro-F1 leaves out classes that neither occur nor are predicted, and
    balanced accuracy leaves out classes that do not occur.
    """
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    present = true > 0
    recall = right[present] / true[present]
    total_late = true[list(late)].sum().item() if late else 0.0
    f1, macro = _f1(right, true, predicted)
    return Scores(
        {
            "loss": loss,
            "accuracy": (right.sum() / true.sum()).item(),
            "balanced_accuracy": recall.mean().item(),
            "macro_f1": macro,
            "accuracy_affected": right[list(late)].sum().item() / total_late
            if total_late
            else None,
        },
        f1,
    )


def _f1(right: Tensor, true: Tensor, predicted: Tensor) -> tuple[tuple[float | None, ...], float]:
    """2 right / (true + predicted) of each class or label, None without any; and their mean."""
    seen = (true + predicted) > 0
    f1 = torch.where(seen, 2 * right / (true + predicted).clamp_min(1e-300), torch.nan)
    each = tuple(value if some else None for value, some in zip(f1.tolist(), seen, strict=True))
    return each, f1[seen].mean().item()


# Several labels per example: a label is predicted if its logit is above 0.


def label_scores(outputs: Tensor, targets: Tensor) -> Scores:
    """Macro-F1, mean average precision and balanced accuracy over labels, and F1 of each label.

    Macro-F1 leaves out labels that neither occur nor are predicted, average precision those
    without a positive, balanced accuracy those without a positive or without a negative example.
    """
    known = ~targets.isnan()
    true, predicted = known & (targets > 0.5), known & (outputs > 0)
    right, positives = (true & predicted).sum(0).double(), true.sum(0).double()
    negatives = known.sum(0) - positives
    f1, macro = _f1(right, positives, predicted.sum(0).double())
    rejected = (known & ~true & ~predicted).sum(0)
    both = (positives > 0) & (negatives > 0)
    balanced = (right[both] / positives[both] + rejected[both] / negatives[both]) / 2
    precision = [
        average_precision(outputs[known[:, j], j], true[known[:, j], j])
        for j in range(targets.shape[1])
        if positives[j] > 0
    ]
    return Scores(
        {
            "macro_f1": _finite(macro),
            "mean_average_precision": _mean(precision),
            "balanced_accuracy": balanced.mean().item() if len(balanced) else None,
        },
        f1,
    )


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Sum over distinct thresholds of precision times the gain in recall, as in scikit-learn."""
    ordered, order = scores.double().sort(descending=True, stable=True)
    right = positive[order].double().cumsum(0)
    # Equal scores share one threshold: the last of them counts.
    last = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])
    right, taken = right[last], (torch.arange(len(ordered)) + 1)[last]
    gained = torch.diff(right, prepend=right.new_zeros(1))
    return ((right / taken) * gained).sum().item() / right[-1].item()


# Numbers.


def number_scores(outputs: Tensor, targets: Tensor) -> Scores:
    """Mean absolute error, root mean squared error and R2.

    R2 is the mean over the columns of the targets; None if all of these are constant.
    """
    columns = (len(targets), -1)
    outputs, targets = outputs.reshape(columns).double(), targets.reshape(columns).double()
    known = ~targets.isnan()
    difference = torch.where(known, outputs - targets, 0.0)
    count, total = known.sum(0), int(known.sum())
    if not total:
        return Scores({"mae": None, "rmse": None, "r2": None})
    mean = torch.where(known, targets, 0.0).sum(0) / count.clamp_min(1)
    spread = torch.where(known, targets - mean, 0.0).square().sum(0)
    varies = spread > 0
    r2 = 1 - difference.square().sum(0)[varies] / spread[varies]
    return Scores(
        {
            "mae": difference.abs().sum().item() / total,
            "rmse": math.sqrt(difference.square().sum().item() / total),
            "r2": r2.mean().item() if len(r2) else None,
        }
    )


# Tokens.


def token_scores(parts: Iterable[tuple[Tensor, Tensor]]) -> Scores:
    """Perplexity, exp of the mean cross-entropy over tokens, and token accuracy.

    The outputs of a part are not kept.
    """
    loss, right, total = 0.0, 0, 0
    for outputs, targets in parts:
        known = targets >= 0
        logits, tokens = outputs[known], targets[known]
        loss += F.cross_entropy(logits, tokens, reduction="sum").item()
        right += int((logits.argmax(-1) == tokens).sum())
        total += len(tokens)
    if not total:
        return Scores({"perplexity": None, "token_accuracy": None})
    mean = loss / total
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Scores({"perplexity": perplexity, "token_accuracy": right / total})


# Over devices.


@dataclass(frozen=True)
class OverDevices:
    """Unweighted mean and worst value of one score over devices; None if there is no device."""

    mean: float | None
    worst: float | None


@dataclass(frozen=True)
class LocalScores:
    """The local test score called `metric` over devices (each device counts once).

    `late_mean` is the mean over the late devices, `worst_device` the first device of the worst
    score, `each` the score by device, `further` other local scores. None where there is no device
    to measure.
    """

    metric: str
    mean: float | None
    worst: float | None
    late_mean: float | None
    worst_device: int | None
    each: Mapping[int, float]
    further: Mapping[str, OverDevices] = field(default_factory=dict)


def over_devices(
    found: Mapping[int, Scores],
    late: Collection[int],
    metric: str = "accuracy",
    lower_is_better: bool = False,
    further: Sequence[str] = (),
) -> LocalScores:
    """Summarise the local test scores of the measured devices."""
    values = _known(found, metric)
    worst = max if lower_is_better else min
    return LocalScores(
        metric,
        mean=_mean(list(values.values())),
        worst=worst(values.values(), default=None),
        late_mean=_mean([values[device] for device in late if device in values]),
        worst_device=worst(values, key=lambda device: values[device], default=None),
        each=values,
        further={name: _over(list(_known(found, name).values())) for name in further},
    )


def _known(found: Mapping[int, Scores], metric: str) -> dict[int, float]:
    """The scores by device, without those that are None."""
    each = {device: scores[metric] for device, scores in found.items()}
    return {device: value for device, value in each.items() if value is not None}


def _over(values: Sequence[float]) -> OverDevices:
    return OverDevices(_mean(values), min(values, default=None))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Accuracy, balanced accuracy, macro-F1 and F1 of each class from a confusion matrix."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """The metrics of one evaluation; None where the test set has no examples for it."""

    loss: float
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    accuracy_affected: float | None
    f1: tuple[float | None, ...]


def confusion(targets: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """counts[i, j] = number of examples of class i that were predicted as class j."""
    flat = torch.bincount(targets * classes + predicted, minlength=classes * classes)
    return flat.view(classes, classes).double()


def scores(counts: Tensor, loss: float, late: Sequence[int] = ()) -> Scores:
    """The metrics of a confusion matrix; `accuracy_affected` is that on the classes `late`.

    As in scikit-learn, macro-F1 leaves out classes that neither occur nor are predicted, and
    balanced accuracy leaves out classes that do not occur.
    """
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    present = true > 0
    seen = (true + predicted) > 0
    f1 = torch.where(seen, 2 * right / (true + predicted).clamp_min(1e-300), torch.nan)
    recall = right[present] / true[present]
    total_late = true[list(late)].sum().item() if late else 0.0
    return Scores(
        loss=loss,
        accuracy=(right.sum() / true.sum()).item(),
        balanced_accuracy=recall.mean().item(),
        macro_f1=f1[seen].mean().item(),
        accuracy_affected=right[list(late)].sum().item() / total_late if total_late else None,
        f1=tuple(value if known else None for value, known in zip(f1.tolist(), seen, strict=True)),
    )


@dataclass(frozen=True)
class OverDevices:
    """Unweighted mean and minimum of one score over devices; None if there is no device."""

    mean: float | None
    worst: float | None


@dataclass(frozen=True)
class ClientAccuracy:
    """Local test accuracy over devices (each device counts once), and two other local scores.

    `late_mean` is the mean over the late devices, `worst_device` the first device of the lowest
    accuracy, `each` the accuracy by device. None where there is no device to measure.
    """

    mean: float | None
    worst: float | None
    late_mean: float | None
    balanced: OverDevices
    macro_f1: OverDevices
    worst_device: int | None
    each: Mapping[int, float]


def over_devices(found: Mapping[int, Scores], late: Collection[int]) -> ClientAccuracy:
    """Summarise the local test scores of the measured devices."""
    accuracy = {device: each.accuracy for device, each in found.items()}
    return ClientAccuracy(
        mean=_mean(list(accuracy.values())),
        worst=min(accuracy.values(), default=None),
        late_mean=_mean([accuracy[device] for device in late if device in accuracy]),
        balanced=_over([each.balanced_accuracy for each in found.values()]),
        macro_f1=_over([each.macro_f1 for each in found.values()]),
        worst_device=min(accuracy, key=lambda device: accuracy[device], default=None),
        each=accuracy,
    )


def _over(values: Sequence[float]) -> OverDevices:
    return OverDevices(_mean(values), min(values, default=None))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

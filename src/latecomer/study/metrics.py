"""Metrics from one confusion matrix: accuracy, balanced accuracy, macro-F1, F1 of each class."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What an evaluation says. None: there was nothing to measure it on."""

    loss: float
    accuracy: float
    balanced_accuracy: float
    macro_f1: float
    accuracy_affected: float | None
    f1: tuple[float | None, ...]


def confusion(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """counts[i, j] = examples of class i taken for class j."""
    flat = torch.bincount(truth * classes + predicted, minlength=classes * classes)
    return flat.view(classes, classes).double()


def scores(counts: Tensor, loss: float, affected: Sequence[int] = ()) -> Scores:
    """The same definitions as scikit-learn's: classes that neither occur nor are predicted are
    left out of macro-F1, classes that do not occur are left out of balanced accuracy."""
    right, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    present = true > 0
    seen = (true + predicted) > 0
    f1 = torch.where(seen, 2 * right / (true + predicted).clamp_min(1e-300), torch.nan)
    recall = right[present] / true[present]
    total_affected = true[list(affected)].sum().item() if affected else 0.0
    return Scores(
        loss=loss,
        accuracy=(right.sum() / true.sum()).item(),
        balanced_accuracy=recall.mean().item(),
        macro_f1=f1[seen].mean().item(),
        accuracy_affected=right[list(affected)].sum().item() / total_affected
        if total_affected
        else None,
        f1=tuple(value if known else None for value, known in zip(f1.tolist(), seen, strict=True)),
    )

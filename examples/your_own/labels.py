"""Several labels per example, some unknown, with a loss and a metric of your own."""

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

import latecomer

LABELS = 6


def examples(count: int = 1200) -> tuple[np.ndarray, np.ndarray]:
    """Made up: each label depends on other inputs; a fifth of the labels is unknown (NaN)."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, 16)).astype("float32")
    y = (x @ rng.normal(size=(16, LABELS)) > 1).astype("float32")
    return x, np.where(rng.random(y.shape) < 0.2, np.nan, y)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of the known labels; positive ones, which are rare, count twice."""
    known = ~targets.isnan()
    targets = targets.nan_to_num()
    each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (each * known * (1 + targets)).sum(1) / known.sum(1).clamp(min=1)


def found(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of the positive labels that the model finds."""
    return ((outputs > 0) & (targets == 1)).sum() / (targets == 1).sum()


def main(updates: int = 400, out: str = "runs/labels") -> latecomer.Result:
    config = {
        "data": {"partition": "iid"},
        "fleet": {"devices": 20, "profile": "phones"},
        "training": {"optimizer": "adamw", "lr": 0.01, "schedule": "cosine"},
        "objective": {"kind": "multi-label", "metrics": ["macro_f1", "mean_average_precision"]},
        "stop": {"updates": updates},
    }
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, LABELS))
    data, metrics = examples(), {"found": found}
    return latecomer.run(config, out, model=net, data=data, loss=loss, metrics=metrics)


if __name__ == "__main__":
    print(main().metrics.iloc[:, 4:])

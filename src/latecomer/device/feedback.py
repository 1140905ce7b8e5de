"""Metrics of an update that describe how well the model fits the device's data.

Li et al. 2024 (EchoPFL), section 4.3.1.
"""

import torch
from torch import Tensor

from latecomer.device.flat import FlatModel

MAX_EXAMPLES_AT_ONCE = 4096  # in one forward pass


@torch.no_grad()
def feedback(model: FlatModel, params: Tensor, x: Tensor, y: Tensor) -> dict[str, float]:
    """Metrics of the model at `params` on the examples (x, y).

    "feedback": chi-squared of the predicted against the actual label frequencies, times the mean
    variance of the soft labels (Eq. 3), which is small for an untrained model. "error": the share
    of misclassified examples. Per class, "soft_0" ...: mean soft label.
    """
    outputs = [model.logits(params, part) for part in torch.split(x, MAX_EXAMPLES_AT_ONCE)]
    logits = torch.cat(outputs).double()
    soft = logits.softmax(1)
    predicted, classes = soft.argmax(1), soft.shape[1]
    spread = soft.var(1, correction=0).mean().item()
    chi2 = chi_squared(frequencies(predicted, classes), frequencies(y, classes))
    wrong = (predicted != y).double().mean().item()
    means = {f"soft_{j}": value for j, value in enumerate(soft.mean(0).tolist())}
    return {"feedback": chi2 * spread, "error": wrong} | means  # Eq. 3


def frequencies(labels: Tensor, classes: int) -> Tensor:
    """Class frequencies with one example added to every class, so that none is 0."""
    counts = torch.bincount(labels, minlength=classes).double() + 1
    return counts / counts.sum()


def chi_squared(observed: Tensor, expected: Tensor) -> float:
    """Sum of (observed - expected)^2 / expected. Eq. 2."""
    return ((observed - expected).square() / expected).sum().item()

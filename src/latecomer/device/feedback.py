"""Metrics of an update that describe how well the model fits the device's data.

Li et al. 2024 (EchoPFL), section 4.3.1.
"""

import torch
from torch import Tensor

from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import prior_shift

MAX_EXAMPLES_AT_ONCE = 4096  # in one forward pass


@torch.no_grad()
def feedback(
    model: FlatModel, params: Tensor, x: Tensor, y: Tensor, prior_correction: bool = False
) -> dict[str, float]:
    """Metrics of the model at `params` on the examples (x, y).

    "feedback": chi-squared of the predicted against the actual label frequencies, times the mean
    variance of the soft labels (Eq. 3), which is small for an untrained model. "error": the share
    of misclassified examples, after a label-shift correction if `prior_correction`. Per
    class, "soft_0" ...: mean soft label p, "share_0" ...: label frequency, "sway_0" ...: mean of
    p (1 - p).
    """
    outputs = [model.logits(params, part) for part in torch.split(x, MAX_EXAMPLES_AT_ONCE)]
    logits = torch.cat(outputs).double()
    soft = logits.softmax(1)
    predicted, classes = soft.argmax(1), soft.shape[1]
    spread = soft.var(1, correction=0).mean().item()
    chi2 = chi_squared(frequencies(predicted, classes), frequencies(y, classes))
    corrected = logits + prior_shift(y, classes) if prior_correction else logits
    wrong = (corrected.argmax(1) != y).double().mean().item()
    found = {"feedback": chi2 * spread, "error": wrong}  # Eq. 3
    per_class = {
        "soft": soft.mean(0),
        "share": torch.bincount(y, minlength=classes) / len(y),
        "sway": (soft * (1 - soft)).mean(0),
    }
    for name, values in per_class.items():
        found |= {f"{name}_{j}": value for j, value in enumerate(values.tolist())}
    return found


def frequencies(labels: Tensor, classes: int) -> Tensor:
    """Class frequencies with one example added to every class, so that none is 0."""
    counts = torch.bincount(labels, minlength=classes).double() + 1
    return counts / counts.sum()


def chi_squared(observed: Tensor, expected: Tensor) -> float:
    """Sum of (observed - expected)^2 / expected. Eq. 2."""
    return ((observed - expected).square() / expected).sum().item()

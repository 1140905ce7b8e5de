"""What a device tells of how well a model fits its data.

Li et al. 2024 (EchoPFL), section 4.3.1.
"""

import torch
from torch import Tensor

from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import prior_corrected_logits

EVALUATED_AT_ONCE = 4096  # examples


@torch.no_grad()
def feedback(
    model: FlatModel, params: Tensor, x: Tensor, y: Tensor, mix: float = 0.0
) -> dict[str, float]:
    """The device's judgement of the model at `params`, as metrics of an update.

    "feedback": chi-squared of the predicted against the actual label frequencies, times the
    variance of the soft labels (Eq. 3), which is small for an untrained model. "error": the share
    of examples that are predicted wrongly, of which frequencies alone tell nothing; with `mix` as
    the device would predict them. Per class, "soft_0" ...: the mean soft label p, "share_0" ...:
    how often it is, "sway_0" ...: the mean of p (1 - p).
    """
    outputs = [model.logits(params, part) for part in torch.split(x, EVALUATED_AT_ONCE)]
    logits = torch.cat(outputs).double()
    soft = logits.softmax(1)
    predicted, classes = soft.argmax(1), soft.shape[1]
    spread = soft.var(1, correction=0).mean().item()
    chi2 = chi_squared(frequencies(predicted, classes), frequencies(y, classes))
    wrong = (prior_corrected_logits(logits, y, mix).argmax(1) != y).double().mean().item()
    told = {"feedback": chi2 * spread, "error": wrong}  # Eq. 3
    per_class = {
        "soft": soft.mean(0),
        "share": torch.bincount(y, minlength=classes) / len(y),
        "sway": (soft * (1 - soft)).mean(0),
    }
    for name, values in per_class.items():
        told |= {f"{name}_{j}": value for j, value in enumerate(values.tolist())}
    return told


def frequencies(labels: Tensor, classes: int) -> Tensor:
    """How frequent each class is; every one is given an example more, so that none has 0."""
    counts = torch.bincount(labels, minlength=classes).double() + 1
    return counts / counts.sum()


def chi_squared(observed: Tensor, expected: Tensor) -> float:
    """Sum of (observed - expected)^2 / expected. Eq. 2."""
    return ((observed - expected).square() / expected).sum().item()

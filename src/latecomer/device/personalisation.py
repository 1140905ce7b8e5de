"""Personalisation of a model on a device, from the device's training examples and last update.

Label-shift correction adds log(p_device / p_model) to the logits, where p_device are the class
frequencies of the device and p_model those that the model predicts (Saerens et al. 2002).
Interpolation adds a share of the device's last update to the parameters: the share with the fewest
errors on the device's training examples. Nothing of it leaves the device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from latecomer.core.messages import ServingSettings
from latecomer.device.flat import FlatModel

# Weights of the prior in examples, of which the one with the largest evidence is used.
PRIOR_WEIGHTS = tuple(0.1 * 2.0**i for i in range(20))
MIN_CLASS_PRIOR = 1e-3  # lower bound on every p_model before they are normalised
SHARES = (0.0, 0.25, 0.5, 1.0)  # of `ServingSettings.interpolation`, compared by training errors
MAX_EXAMPLES = 256  # training examples on which the shares are compared


class Personalised(NamedTuple):
    """A device's parameters, and what it adds to the logits, one value per class."""

    params: Tensor
    output_bias: Tensor


@torch.no_grad()
def personalise(
    network: FlatModel,
    params: Tensor,
    settings: ServingSettings,
    update: Tensor | None,
    x: Tensor,
    y: Tensor,
) -> Personalised:
    """The model `params` as a device with the training examples (x, y) uses it.

    `update` is the delta of the device's last training, None if it has none.
    """
    bias = output_bias(settings, y, network.num_classes)
    if not settings.interpolation:
        return Personalised(params, bias)
    errors = training_errors(network.logits, x, y, bias)
    return Personalised(interpolated(params, update, settings.interpolation, errors), bias)


def output_bias(settings: ServingSettings, labels: Tensor, num_classes: int) -> Tensor:
    """`settings.output_bias` + `settings.prior_correction` * log(p_device / p_model), per class.

    A class prior or output bias of another number of classes is ignored.
    """
    bias = _per_class(settings.output_bias, num_classes, torch.float32)
    found = torch.zeros(num_classes) if bias is None else bias
    if not settings.prior_correction:
        return found
    prior = _per_class(settings.class_prior, num_classes, torch.float64)
    return found + settings.prior_correction * prior_shift(labels, num_classes, prior)


def prior_shift(labels: Tensor, num_classes: int, class_prior: Tensor | None = None) -> Tensor:
    """log(p_device / p_model) per class; `class_prior` is p_model, None is uniform.

    p_device = (n_c + t p_model) / (n + t) with the counts n_c of `labels`. t, the weight of the
    prior in examples, is the one of `PRIOR_WEIGHTS` that maximises the likelihood of the counts.
    """
    counts = torch.bincount(labels, minlength=num_classes).double()
    prior = torch.ones(num_classes) if class_prior is None else class_prior
    prior = prior.clamp_min(MIN_CLASS_PRIOR)
    prior = (prior / prior.sum()).double()
    weights = torch.tensor(PRIOR_WEIGHTS, dtype=counts.dtype)
    weight = weights[_evidence(counts, weights[:, None] * prior).argmax()]
    frequency = (counts + weight * prior) / (counts.sum() + weight)
    return (frequency / prior).log().float()


def _evidence(counts: Tensor, priors: Tensor) -> Tensor:
    """Log-likelihood of `counts` under a Dirichlet-multinomial, for each row of `priors`."""
    sums = priors.sum(1)
    each = torch.lgamma(priors + counts) - torch.lgamma(priors)
    return torch.lgamma(sums) - torch.lgamma(sums + counts.sum()) + each.sum(1)


def _per_class(values: Sequence[float], num_classes: int, dtype: torch.dtype) -> Tensor | None:
    return torch.tensor(values, dtype=dtype) if len(values) == num_classes else None


def interpolated(
    params: Tensor, update: Tensor | None, interpolation: float, errors: Callable[[Tensor], int]
) -> Tensor:
    """params + s * interpolation * update for the s of `SHARES` with the fewest `errors`.

    The smallest s wins a tie. Without an update of the same size, `params` itself.
    """
    if update is None or update.numel() != params.numel():
        return params
    found = [torch.add(params, update, alpha=s * interpolation) if s else params for s in SHARES]
    return min(found, key=errors)


def training_errors(
    logits: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, bias: Tensor
) -> Callable[[Tensor], int]:
    """The number of misclassified training examples as a function of the parameters.

    It counts on a fixed subsample of `MAX_EXAMPLES`. An output that is not finite is an error.
    """
    x, y = subsample(x, y, MAX_EXAMPLES)

    def errors(params: Tensor) -> int:
        outputs = logits(params, x) + bias
        right = (outputs.argmax(1) == y) & outputs.isfinite().all(1)
        return len(y) - int(right.sum())

    return errors


def subsample(x: Tensor, y: Tensor, max_examples: int) -> tuple[Tensor, Tensor]:
    """At most `max_examples` of the examples, drawn with a fixed seed."""
    if len(y) <= max_examples:
        return x, y
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:max_examples]
    return x[chosen], y[chosen]

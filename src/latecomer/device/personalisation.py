"""Personalisation of a model on a device, from the device's training examples.

Label-shift correction adds log(p_device / p_model) to the logits, where p_device are the class
frequencies of the device and p_model those that the model was trained on (Saerens et al. 2002).
Fine-tuning trains the model on the device's examples. Nothing of it leaves the device.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from latecomer.core.messages import ServingSettings, TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.training import local_update, plan_batches

# Weights of the prior in examples, of which the one with the largest evidence is used.
PRIOR_WEIGHTS = tuple(0.1 * 2.0**i for i in range(20))
MIN_CLASS_PRIOR = 1e-3  # lower bound on every p_model before they are normalised
FINETUNE_SEED = 0


class Personalised(NamedTuple):
    """A device's parameters, and what it adds to the outputs: one value per class, or 0."""

    params: Tensor
    output_bias: Tensor


def personalise(
    network: FlatModel,
    params: Tensor,
    settings: ServingSettings,
    spec: TrainSpec,
    x: Tensor,
    y: Tensor,
) -> Personalised:
    """The model `params` as a device with the training examples (x, y) uses it.

    Only logits of classes are corrected for a prior. Fine-tuning follows the training program
    `spec` for `settings.finetune_epochs`, in a fixed order of examples.
    """
    classifies = network.objective.classifies
    bias = output_bias(settings, y, network.num_classes) if classifies else torch.zeros(())
    if settings.finetune_epochs and len(y):
        spec = replace(
            spec,
            local_epochs=settings.finetune_epochs,
            local_steps=0,
            last_layer_only=False,
            prox=0.0,
            clip=0.0,
        )
        rng = torch.Generator().manual_seed(FINETUNE_SEED)
        with torch.enable_grad():  # evaluations run without gradients
            params = local_update(network, params, x, y, spec, plan_batches(len(y), spec, rng))
    return Personalised(params, bias)


def output_bias(settings: ServingSettings, labels: Tensor, num_classes: int) -> Tensor:
    """log(p_device / p_model) per class with `settings.prior`, else 0.

    A class prior of another number of classes is ignored.
    """
    if not settings.prior:
        return torch.zeros(num_classes)
    known = len(settings.class_prior) == num_classes
    prior = torch.tensor(settings.class_prior, dtype=torch.float64) if known else None
    return prior_shift(labels, num_classes, prior)


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


def subsample(x: Tensor, y: Tensor, max_examples: int) -> tuple[Tensor, Tensor]:
    """At most `max_examples` of the examples, drawn with a fixed seed."""
    if len(y) <= max_examples:
        return x, y
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:max_examples]
    return x[chosen], y[chosen]

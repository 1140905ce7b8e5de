"""How a device makes the model it was sent its own before it uses it. It sends nothing for that.

A model that serves many says too seldom what is frequent here. A device knows its class mix, and by
Bayes' rule the logits want log(share here / share the model expects) added (Saerens et al. 2002).
It also has the change that it last trained: put on top of a newer model, a part of it tells of the
person or the place.
"""

import torch
from torch import Tensor

# How many examples' worth of trust there is in what the model expects: one of these fits best.
TRUST = tuple(0.1 * 2.0**i for i in range(20))
LEAST = 1e-3  # share that a model expects of every class at least


def class_offset(labels: Tensor, classes: int, expected: Tensor | None = None) -> Tensor:
    """What is to be added to the logits on a device with these labels.

    `expected` are the shares of the classes for which the model was made; None is all alike.
    """
    counts = torch.bincount(labels, minlength=classes).double()
    usual = torch.ones(classes) if expected is None else expected.clamp_min(LEAST)
    usual = (usual / usual.sum()).double()
    trusts = torch.tensor(TRUST, dtype=counts.dtype)
    trust = trusts[_evidence(counts, trusts[:, None] * usual).argmax()]
    share = (counts + trust * usual) / (counts.sum() + trust)
    return (share / usual).log().float()


def _evidence(counts: Tensor, priors: Tensor) -> Tensor:
    """The log-likelihood of the counts if their mix is drawn from Dirichlet(prior), for each."""
    sums = priors.sum(1)
    each = torch.lgamma(priors + counts) - torch.lgamma(priors)
    return torch.lgamma(sums) - torch.lgamma(sums + counts.sum()) + each.sum(1)


def own_logits(
    logits: Tensor, labels: Tensor, mix: float, expected: Tensor | None = None
) -> Tensor:
    """The logits as a device with these labels takes them; `mix` 0 leaves them as they are."""
    return logits + mix * class_offset(labels, logits.shape[-1], expected) if mix else logits


def own_params(params: Tensor, change: Tensor | None, keep: float) -> Tensor:
    """A newer model with the share `keep` of what the device's own training last changed."""
    if not keep or change is None or change.numel() != params.numel():
        return params
    return torch.add(params, change, alpha=keep)

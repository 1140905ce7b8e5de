"""How a device makes the model it was sent its own before it uses it. It sends nothing for that.

A model that serves many says too seldom what is frequent here. A device knows its class mix, and by
Bayes' rule the logits want log(share here / share the model expects) added (Saerens et al. 2002).
It also has the change that it last trained: put on top of a newer model, a part of it tells of the
person or the place. It tries on its own examples how large a part serves it: a change that is old,
or from before its world changed, may serve it worse than none.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# How many examples' worth of trust there is in what the model expects: one of these fits best.
TRUST = tuple(0.1 * 2.0**i for i in range(20))
LEAST = 1e-3  # share that a model expects of every class at least
PARTS = (0.0, 0.25, 0.5, 1.0)  # of what may be kept
TRIED = 256  # examples on which a device tries what to keep, at most


def class_prior_offset(labels: Tensor, classes: int, expected: Tensor | None = None) -> Tensor:
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


def prior_correction(
    labels: Tensor, classes: int, mix: float, expected: Tensor | None = None
) -> Tensor | float:
    """`mix` of what a device with these labels adds to the logits; 0 leaves them as they are."""
    return mix * class_prior_offset(labels, classes, expected) if mix else 0.0


def prior_corrected_logits(
    logits: Tensor, labels: Tensor, mix: float, expected: Tensor | None = None
) -> Tensor:
    """The logits as a device with these labels takes them; `mix` 0 leaves them as they are."""
    return logits + prior_correction(labels, logits.shape[-1], mix, expected) if mix else logits


def interpolated_params(
    params: Tensor, change: Tensor | None, keep: float, errors: Callable[[Tensor], int]
) -> Tensor:
    """A newer model with a part of what the device's own training last changed.

    At most the share `keep`, and the smallest part with the fewest `errors` (`training_errors`).
    """
    if not keep or change is None or change.numel() != params.numel():
        return params
    found = [torch.add(params, change, alpha=part * keep) if part else params for part in PARTS]
    return min(found, key=errors)


def some_of(x: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most so many of the examples, always the same ones."""
    if len(y) <= most:
        return x, y
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:most]
    return x[chosen], y[chosen]


def training_errors(
    logits: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, offset: Tensor | float
) -> Callable[[Tensor], int]:
    """How many of a device's own examples a model has wrong: some of them, always the same ones.

    `logits` gives the outputs of a model on examples, to which the device adds `offset`.
    """
    x, y = some_of(x, y, TRIED)

    def errors(params: Tensor) -> int:
        outputs = logits(params, x) + offset
        right = (outputs.argmax(1) == y) & outputs.isfinite().all(1)
        return len(y) - int(right.sum())

    return errors

"""Merging the models of two clusters. Li et al. 2024 (EchoPFL), section 4.3.2."""

from torch import Tensor


def symmetric_kl(p: Tensor, q: Tensor) -> float:
    """KL(p, q) + KL(q, p) of two distributions."""
    p, q = p.clamp_min(1e-9), q.clamp_min(1e-9)
    return ((p - q) * (p.log() - q.log())).sum().item()


def merged_params(main: Tensor, auxiliary: Tensor, posterior: Tensor) -> Tensor:
    """The main model moved to the auxiliary one where the delta `posterior` agrees. Algorithm 1."""
    agreement = (auxiliary - main) * posterior  # lines 2-4
    top = agreement.max()
    if top <= 0:
        return main.clone()
    alpha: Tensor = agreement.clamp_min(0.0) / top  # line 5
    return alpha * auxiliary + (1 - alpha) * main  # line 6

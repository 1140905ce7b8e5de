"""Li et al., Federated Optimization in Heterogeneous Networks, 2020 (FedProx).

FedAvg with the proximal term mu/2 * ||w - w_base||^2 in the local objective (Eq. 2); w_base is the
model the device was sent.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import NotNegative
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.recipe import recipe


@recipe("fedprox", "FedAvg with a proximal term on devices", "Li et al. 2020", of=(fedavg,))
def fedprox(plain: Strategy, mu: NotNegative = 0.01) -> Strategy:
    """Options, beside those of `fedavg`:

    mu: strength of the proximal term; raise it where devices drift apart. Replaces `training.prox`.
    """
    prepare = plain.prepare
    return replace(plain, name="fedprox", prepare=lambda spec: replace(prepare(spec), prox=mu))

"""Li et al., Federated Optimization in Heterogeneous Networks, 2020 (FedProx).

FedAvg with the proximal term mu/2 * ||w - w_base||^2 in the local objective (Eq. 2); w_base is the
model the device was sent.
"""

from dataclasses import replace

from latecomer.core.strategy import Strategy
from latecomer.strategies.options import Count, NotNegative, Positive, Share
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.parts.selecting import SelectName
from latecomer.strategies.recipe import recipe


@recipe("fedprox", "FedAvg with a proximal term on devices", "Li et al. 2020")
def fedprox(
    mu: NotNegative = 0.01,
    fraction: Share = 1.0,
    timeout: NotNegative = 0.0,
    min_devices: Count = 1,
    server_lr: Positive = 1.0,
    select: SelectName = "random",
) -> Strategy:
    """Options:

    mu: strength of the proximal term; raise it where devices drift apart. Replaces `training.prox`.
    fraction, timeout, min_devices, server_lr, select: as in `fedavg`.
    """
    plain = fedavg(fraction, timeout, min_devices, server_lr, select)
    prepare = plain.prepare
    return replace(plain, name="fedprox", prepare=lambda spec: replace(prepare(spec), prox=mu))

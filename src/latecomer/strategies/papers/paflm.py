"""Lu et al., Privacy-Preserving Asynchronous Federated Learning Mechanism for Edge Network
Computing, 2020 (PAFLM).

A device does not upload a delta that differs little from its last upload
(`device.memory.lazy_upload`). Every uploaded delta is added on arrival,
w <- w + server_lr * s(tau, M) * (n_i / N) delta_i, with s(tau, M) = min(1, alpha^(tau / M - 1))
for M devices.
"""

from dataclasses import replace

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import CountOrOff, NotNegative, Positive, Share
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


def freshness(alpha: float, staleness: int, devices: int) -> float:
    """s(tau, M) = min(1, alpha^(tau / M - 1)): 1 for updates up to a fleet pass old."""
    return float(min(1.0, alpha ** (staleness / devices - 1.0)))


@recipe(
    "paflm",
    "devices skip uploads with little change; updates added by staleness and share of examples",
    "Lu et al. 2020 (PAFLM)",
)
def paflm(
    threshold: NotNegative = 10.0,
    accumulate: bool = True,
    alpha: Share = 0.5,
    server_lr: Positive = 1.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    threshold: the paper's 1 / beta; an upload is skipped while the squared change of the delta is
        at most this times the squared movement of the model; 0: every delta is uploaded.
    accumulate: add skipped deltas to the next one; without, they are lost.
    alpha: factor on the weight per fleet pass of staleness beyond the first; 1: no discount. Raise
        it where late devices must count.
    server_lr: factor on the share of examples.
    concurrency: largest number of devices that work at a time; 0: all.
    """

    def prepare(spec: TrainSpec) -> TrainSpec:
        return replace(spec, lazy=threshold, accumulate_residual=accumulate and threshold > 0)

    return Strategy(
        name="paflm",
        weigh=ByShareOfExamples(lambda staleness, devices: freshness(alpha, staleness, devices)),
        merge=Buffer(1, step=server_lr),
        dispatch=ImmediateDispatch(concurrency),
        prepare=prepare,
    )

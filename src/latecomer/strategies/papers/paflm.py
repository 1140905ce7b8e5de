"""Lu et al., Privacy-Preserving Asynchronous Federated Learning Mechanism for Edge Network
Computing, 2020 (PAFLM).

A device that has little new to say stays silent (`device.memory.if_new`). What is sent moves the
model at once, by its staleness and its device's share of all examples.
"""

from dataclasses import replace

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.strategies.options import CountOrOff, NotNegative, Positive, Share
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


def freshness(alpha: float, staleness: int, devices: int) -> float:
    """min(1, alpha^(tau / M - 1)): full weight up to one turn of the fleet. Parameter weight."""
    return float(min(1.0, alpha ** (staleness / devices - 1.0)))


@recipe(
    "paflm",
    "devices with little new to say stay silent; add updates by freshness and share of examples",
    "Lu et al. 2020 (PAFLM)",
)
def paflm(
    threshold: NotNegative = 10.0,
    accumulate: bool = True,
    alpha: Share = 0.5,
    server_lr: Positive = 1.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """`threshold` is the paper's 1 / beta; 0 sends everything. Silent deltas `accumulate`."""

    def prepare(spec: TrainSpec) -> TrainSpec:
        return replace(spec, lazy=threshold, accumulate_residual=accumulate and threshold > 0)

    return Strategy(
        name="paflm",
        weigh=ByShareOfExamples(lambda staleness, devices: freshness(alpha, staleness, devices)),
        merge=Buffer(1, step=server_lr),
        dispatch=ImmediateDispatch(concurrency),
        prepare=prepare,
    )

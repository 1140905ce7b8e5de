"""Chen et al., Asynchronous Online Federated Learning for Edge Devices with Non-IID Data, 2020.

ASO-Fed: every update is added on arrival by its device's share of all examples,
w <- w + server_lr * (n_k / N) delta_k. Devices train with a proximal term and mix their gradient
with earlier ones (`device.memory.balanced`). Their learning rate is multiplied by
r = max(1, log d), with d the mean time in seconds from sending a task to its answer. Left out: the
server's feature representation learning (docs/papers.md).
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from latecomer.core.messages import Contribution, TrainSpec
from latecomer.core.strategy import (
    Assignment,
    Commit,
    ImmediateDispatch,
    ServerView,
    Stateful,
    Strategy,
)
from latecomer.strategies.options import CountOrOff, NotNegative, Positive, Proportion
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


def step_scale(mean_delay: float) -> float:
    """r = max(1, log d), with d the mean delay of the device in seconds."""
    return max(1.0, math.log(max(mean_delay, 1.0)))  # dynamic learning step size


class AsoFedMerge(Stateful):
    """Merge: w <- w + step * (n_k / N) delta_k on arrival.

    `dispatch` sets the learning rate of each device by its mean delay.
    """

    kept = ("_delays",)

    def __init__(self, step: float, dynamic: bool, concurrency: int) -> None:
        self.step, self.dynamic = step, dynamic
        self.immediate = ImmediateDispatch(concurrency)
        self._delays: dict[int, tuple[int, float]] = {}  # device -> updates, sum of their seconds

    def add(self, contribution: Contribution, view: ServerView) -> Commit:
        task, lineage = contribution.task, contribution.lineage
        count, seconds = self._delays.get(task.device, (0, 0.0))
        self._delays[task.device] = (count + 1, seconds + contribution.seconds)
        head = view.store.head_params(lineage)
        params = moved(head, [contribution], mean=False, step=self.step)
        return Commit(lineage, params, 1)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def dispatch(self, view: ServerView) -> Iterable[Assignment]:
        """Dispatch: idle devices, each with the learning rate for its mean delay."""
        for request in self.immediate(view):
            scale = self._scale(request.device) if self.dynamic else 1.0
            spec = view.spec
            yield (
                request
                if scale == 1.0
                else request._replace(spec=replace(spec, lr_scale=spec.lr_scale * scale))
            )

    def _scale(self, device: int) -> float:
        count, seconds = self._delays.get(device, (0, 0.0))
        return step_scale(seconds / count) if count else 1.0


@recipe(
    "aso-fed",
    "add every update by its share of examples; slow devices train at a higher learning rate",
    "Chen et al. 2020 (ASO-Fed)",
)
def aso_fed(
    lam: NotNegative = 0.1,
    beta: Proportion = 0.001,
    dynamic: bool = True,
    server_lr: Positive = 1.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    lam: strength of the proximal term on devices; it replaces `training.prox`.
    beta: share of earlier gradients that a device keeps in its mix, 0 to 1; 0: no mix.
    dynamic: raise the learning rate of a device with the logarithm of its mean delay; switch it off
        where `training.lr` is near divergence.
    server_lr: factor on the share of examples; lower it where the model oscillates.
    concurrency: largest number of devices that work at a time; 0: all.
    """

    def prepare(spec: TrainSpec) -> TrainSpec:
        return replace(spec, prox=lam, balance=beta)

    merge = AsoFedMerge(server_lr, dynamic, concurrency)
    return Strategy(
        name="aso-fed",
        weigh=ByShareOfExamples(),
        merge=merge,
        dispatch=merge.dispatch,
        prepare=prepare,
    )

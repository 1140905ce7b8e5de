"""Chen et al., Asynchronous Online Federated Learning for Edge Devices with Non-IID Data, 2020.

ASO-Fed: every update is added on arrival by its device's share of all examples,
w <- w + server_lr * (n_k / N) delta_k. Devices train with a proximal term and mix their gradient
with earlier ones (`device.memory.balanced`). Their learning rate is multiplied by
r = max(1, log d), with d the mean time in seconds from sending a task to its answer. Optionally the
server multiplies the first weight matrix by a softmax of its magnitudes (feature representation
learning).
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, TrainSpec
from latecomer.core.strategy import (
    Assignment,
    Commit,
    ImmediateDispatch,
    ServerView,
    Stateful,
    Strategy,
)
from latecomer.device.flat import FlatModel
from latecomer.strategies.options import CountOrOff, NotNegative, Positive, Proportion
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


def with_attention(params: Tensor, model: FlatModel) -> Tensor:
    """The parameters with the first weight matrix multiplied by a softmax of its magnitudes.

    alpha[i, j] = exp |w[i, j]| / sum_i exp |w[i, j]|, over the units i of input j; then
    w[i, j] <- alpha[i, j] w[i, j]. alpha is about 1 / (number of units) for weights of similar
    size: as printed, every application shrinks the layer by about that factor.
    """
    layout = model.layout
    found = [name for name, shape in zip(layout.names, layout.shapes, strict=True) if shape[1:]]
    if not found:
        return params
    result = params.clone()
    weights = layout.unflatten(result)[found[0]]
    weights *= torch.softmax(weights.abs(), dim=0)  # feature representation learning
    return result


def step_scale(mean_delay: float) -> float:
    """r = max(1, log d), with d the mean delay of the device in seconds."""
    return max(1.0, math.log(max(mean_delay, 1.0)))  # dynamic learning step size


class AsoFedMerge(Stateful):
    """Merge: w <- w + step * (n_k / N) delta_k on arrival, then attention if switched on.

    `dispatch` sets the learning rate of each device by its mean delay. Attention is skipped where
    the server has no network, and does not change coordinates outside a device's sub-model.
    """

    kept = ("_delays",)

    def __init__(self, step: float, attention: bool, dynamic: bool, concurrency: int) -> None:
        self.step, self.attention, self.dynamic = step, attention, dynamic
        self.immediate = ImmediateDispatch(concurrency)
        self._delays: dict[int, tuple[int, float]] = {}  # device -> updates, sum of their seconds

    def add(self, contribution: Contribution, view: ServerView) -> Commit:
        task, lineage = contribution.task, contribution.lineage
        count, seconds = self._delays.get(task.device, (0, 0.0))
        self._delays[task.device] = (count + 1, seconds + contribution.seconds)
        head = view.store.head_params(lineage)
        params = moved(head, [contribution], mean=False, step=self.step)
        network = view.network(None) if self.attention else None
        if isinstance(network, FlatModel):
            after = with_attention(params, network)
            if task.submodel is None:
                params = after
            else:
                params[task.submodel.index] = task.submodel.take(after)
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
    attention: bool = False,
    server_lr: Positive = 1.0,
    concurrency: CountOrOff = 0,
) -> Strategy:
    """Options:

    lam: strength of the proximal term on devices; it replaces `training.prox`.
    beta: share of earlier gradients that a device keeps in its mix, 0 to 1; 0: no mix.
    dynamic: raise the learning rate of a device with the logarithm of its mean delay; switch it off
        where `training.lr` is near divergence.
    attention: multiply the first layer by a softmax of its magnitudes after every update, as
        printed; it shrinks that layer to 0 within a few commits.
    server_lr: factor on the share of examples; lower it where the model oscillates.
    concurrency: largest number of devices that work at a time; 0: all.
    """

    def prepare(spec: TrainSpec) -> TrainSpec:
        return replace(spec, prox=lam, balance=beta)

    merge = AsoFedMerge(server_lr, attention, dynamic, concurrency)
    return Strategy(
        name="aso-fed",
        weigh=ByShareOfExamples(),
        merge=merge,
        dispatch=merge.dispatch,
        prepare=prepare,
    )

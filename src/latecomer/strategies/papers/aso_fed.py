"""Chen et al., Asynchronous Online Federated Learning for Edge Devices with Non-IID Data, 2020.

ASO-Fed: every update moves the model at once by its device's share of all examples. Devices are
held near the model they were sent, mix their gradient with earlier ones, and take the larger steps
the longer their answers take.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, TrainSpec
from latecomer.core.strategy import Assignment, Commit, ImmediateDispatch, ServerView, Strategy
from latecomer.device.flat import FlatModel
from latecomer.strategies.options import CountOrOff, NotNegative, Positive, Proportion
from latecomer.strategies.parts.merging import moved
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import recipe


def attended(params: Tensor, model: FlatModel) -> Tensor:
    """The model with its first weight matrix times a softmax of its own magnitudes.

    alpha[i, j] = exp |w[i, j]| / sum_i exp |w[i, j]|, over the units i that an input j feeds; then
    w[i, j] <- alpha[i, j] w[i, j]. An alpha is below 1, and near 1 / (number of units) for weights
    of like size: as printed, every application shrinks the layer by about that factor.
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
    """r = max(1, log d): d is the mean time in seconds that the device's answers took."""
    return max(1.0, math.log(max(mean_delay, 1.0)))  # dynamic learning step size


class Aggregate:
    """Merge: w <- w + step * (n_k / N) delta_k at once, then attention if wanted.

    It also keeps how long each device's answers take, for `tasks`. Attention is skipped where the
    server does not know the network, and leaves alone what a sub-model does not cover.
    """

    def __init__(self, step: float, attention: bool, dynamic: bool, concurrency: int) -> None:
        self.step, self.attention, self.dynamic = step, attention, dynamic
        self.at_once = ImmediateDispatch(concurrency)
        self._delays: dict[int, tuple[int, float]] = {}  # device -> answers, seconds they took

    def add(self, contribution: Contribution, view: ServerView) -> Commit:
        task, lineage = contribution.task, contribution.lineage
        count, seconds = self._delays.get(task.device, (0, 0.0))
        self._delays[task.device] = (count + 1, seconds + contribution.seconds)
        head = view.store.head_params(lineage)
        params = moved(head, [contribution], mean=False, step=self.step)
        network = view.network(None) if self.attention else None
        if isinstance(network, FlatModel):
            after = attended(params, network)
            if task.submodel is None:
                params = after
            else:
                params[task.submodel.index] = task.submodel.take(after)
        return Commit(lineage, params, 1)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def tasks(self, view: ServerView) -> Iterable[Assignment]:
        """Dispatch: whoever waits, each with a learning rate for its delay."""
        for wish in self.at_once(view):
            scale = self._scale(wish.device) if self.dynamic else 1.0
            spec = view.spec
            yield (
                wish
                if scale == 1.0
                else wish._replace(spec=replace(spec, lr_scale=spec.lr_scale * scale))
            )

    def _scale(self, device: int) -> float:
        count, seconds = self._delays.get(device, (0, 0.0))
        return step_scale(seconds / count) if count else 1.0

    def state(self) -> dict[str, Any]:
        return {"delays": dict(self._delays)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._delays = dict(state["delays"])


@recipe(
    "aso-fed",
    "add every update by its share of examples; devices mix gradients, slow ones step further",
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
    """`lam` holds devices near the model, `beta` mixes their gradients, `dynamic` scales steps."""

    def prepare(spec: TrainSpec) -> TrainSpec:
        return replace(spec, prox=lam, balance=beta)

    merge = Aggregate(server_lr, attention, dynamic, concurrency)
    return Strategy(
        name="aso-fed",
        weigh=ByShareOfExamples(),
        merge=merge,
        dispatch=merge.tasks,
        prepare=prepare,
    )

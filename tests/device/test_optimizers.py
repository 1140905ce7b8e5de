"""The optimiser steps are those of torch.optim."""

import pytest
import torch
from torch import nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import flat_model
from latecomer.device.training import local_update, plan_batches, shuffled_passes, task_rng

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, 0.5, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, functional: bool) -> None:
    model = flat_model("mlp", (6,), 3, (5,))
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    spec = TrainSpec(4, 8, 0.01, optimizer=name, weight_decay=0.1)
    plan = plan_batches(20, spec, task_rng(0, 0, 0))
    found = local_update(model, model.init(0), x, y, spec, plan, functional=functional)
    model.bind(model.init(0))
    parameters = [nn.Parameter(p.detach().clone()) for p in model.module.parameters()]
    optimizer = OPTIMIZERS[name](parameters)
    for index, mask in zip(*plan, strict=True):
        named = dict(zip(model.layout.names, parameters, strict=True))
        output = torch.func.functional_call(model.module, named, x[index[mask > 0]])
        optimizer.zero_grad()
        nn.functional.cross_entropy(output, y[index[mask > 0]]).backward()
        optimizer.step()
    assert torch.allclose(found, torch.cat([p.flatten() for p in parameters]), atol=1e-5)


@pytest.mark.parametrize(
    ("n", "steps", "epochs", "passes"), [(20, 2, 1, 1), (20, 4, 2, 3), (5, 3, 1, 3)]
)
def test_local_steps_end_the_passes(n: int, steps: int, epochs: int, passes: int) -> None:
    spec = TrainSpec(epochs, 8, local_steps=steps)
    plan = plan_batches(n, spec, task_rng(0, 0, 0))
    assert len(plan.order) == steps * epochs
    assert shuffled_passes(n, spec) == passes
    whole = plan_batches(n, TrainSpec(passes, 8), task_rng(0, 0, 0))
    assert torch.equal(plan.order, whole.order[: steps * epochs])

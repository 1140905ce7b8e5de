"""The local program against torch.optim, against hand-worked numbers, and as a pure function."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import Plan, local_update, plan_batches, task_rng
from latecomer.errors import BadInput

SHAPES = {"mlp": (6,), "cnn1d": (8, 2), "lenet": (1, 8, 8)}
SPECS = {
    "sgd": TrainSpec(momentum=0.0),
    "momentum": TrainSpec(momentum=0.9),
    "adam": TrainSpec(optimizer="adam"),
    "adam decay": TrainSpec(optimizer="adam", weight_decay=0.1),
    "decay": TrainSpec(momentum=0.9, weight_decay=0.1),
    "prox": TrainSpec(momentum=0.5, prox=0.7),
    "scaled": TrainSpec(momentum=0.5, lr_scale=0.3),
    "clip": TrainSpec(momentum=0.5, clip=0.5),
    "head": TrainSpec(momentum=0.9, weight_decay=0.1, prox=0.1, last_layer_only=True),
    "head adam": TrainSpec(optimizer="adam", last_layer_only=True),
    "head clip": TrainSpec(clip=0.1, last_layer_only=True),
}
SPECS = {name: replace(spec, lr=0.05, local_epochs=3, batch_size=8) for name, spec in SPECS.items()}


@cache
def model_of(name: str) -> FlatModel:
    return flat_model(name, SHAPES[name], 3, hidden=(7, 5), width=0.5)


def data_of(name: str, n: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *SHAPES[name], generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def plan_of(n: int, spec: TrainSpec, device: int = 0) -> Plan:
    return plan_batches(n, spec, task_rng(0, device, 0))


def with_torch_optim(
    model: FlatModel, params: Tensor, x: Tensor, y: Tensor, spec: TrainSpec, plan: Plan
) -> Tensor:
    """The loop a reader would write: a module, an optimiser, mini-batches."""
    module = model._seeded(0).to(params.dtype)
    own = list(module.parameters())
    nn.utils.vector_to_parameters(params.clone(), own)
    base = [p.detach().clone() for p in own]
    lr = spec.lr * spec.lr_scale
    tuned = own[-2:] if spec.last_layer_only else own
    optimizer: torch.optim.Optimizer
    if spec.optimizer == "adam":
        optimizer = torch.optim.Adam(tuned, lr=lr, weight_decay=spec.weight_decay)
    else:
        optimizer = torch.optim.SGD(
            tuned, lr=lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    for order, mask in zip(plan.order, plan.mask, strict=True):
        batch = order[mask > 0]
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        for p, b in zip(own, base, strict=True):
            p.grad = p.grad + spec.prox * (p.detach() - b)
        optimizer.step()
    return nn.utils.parameters_to_vector(own).detach()


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in SPECS if "clip" not in kind])
@pytest.mark.parametrize("name", SHAPES)
def test_same_numbers_as_torch_optim(name: str, kind: str, functional: bool) -> None:
    model, spec = model_of(name), SPECS[kind]
    params, (x, y) = model.init(1), data_of(name)
    if spec.optimizer == "adam":
        # Adam divides by the root of tiny second moments, which magnifies float32 rounding.
        params, x = params.double(), x.double()
    plan = plan_of(len(x), spec)
    expected = with_torch_optim(model, params, x, y, spec, plan)
    trained = local_update(model, params, x, y, spec, plan, functional=functional)
    assert (expected - params).abs().max() > 1e-3
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", SPECS)
def test_the_fast_and_the_functional_run_agree(kind: str) -> None:
    model, spec = model_of("lenet"), SPECS[kind]
    params, (x, y) = model.init(1), data_of("lenet")
    plan = plan_of(len(x), spec)
    fast, functional = (
        local_update(model, params, x, y, spec, plan, functional=flag) for flag in (False, True)
    )
    torch.testing.assert_close(fast, functional, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("functional", [False, True])
def test_momentum_by_hand(functional: bool) -> None:
    """One input of 0, so only the bias moves: gradients are softmax(b) - onehot."""
    model = FlatModel(lambda: nn.Linear(1, 2), (1,), 2)
    params = torch.zeros(4)
    spec = TrainSpec(local_epochs=2, batch_size=1, lr=1.0, momentum=0.5)
    x, y = torch.zeros(1, 1), torch.tensor([0])
    trained = local_update(model, params, x, y, spec, plan_of(1, spec), functional=functional)
    # Step 1: gradient (-0.5, 0.5), velocity the same, bias (0.5, -0.5).
    # Step 2: softmax(0.5, -0.5) = (0.7310586, 0.2689414), gradient (-0.2689414, 0.2689414),
    # velocity 0.5 * (-0.5, 0.5) + gradient = (-0.5189414, 0.5189414), bias (1.0189414, -1.0189414).
    torch.testing.assert_close(trained, torch.tensor([0.0, 0.0, 1.0189414, -1.0189414]))


def test_learning_rate_is_scaled() -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp")
    params, plan = model.init(0), plan_of(len(x), SPECS["scaled"])
    expected = local_update(model, params, x, y, replace(SPECS["momentum"], lr=0.015), plan)
    spec = replace(SPECS["momentum"], lr_scale=0.3)
    torch.testing.assert_close(local_update(model, params, x, y, spec, plan), expected)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_nothing_but_the_result_changes(kind: str, functional: bool) -> None:
    model, spec = model_of("mlp"), SPECS[kind]
    params, (x, y) = model.init(1), data_of("mlp")
    plan = plan_of(len(x), spec)
    inputs = (params, x, y, *plan)
    copies = [tensor.clone() for tensor in inputs]
    state = torch.get_rng_state()
    first = local_update(model, params, x, y, spec, plan, functional=functional)
    kept = first.clone()
    second = local_update(model, params, x, y, spec, plan, functional=functional)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert torch.equal(first, kept)
    assert torch.equal(first, second)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", ["head", "head adam", "head clip"])
def test_last_layer_only_moves_nothing_else(kind: str, functional: bool) -> None:
    model, spec = model_of("cnn1d"), SPECS[kind]
    params, (x, y) = model.init(1), data_of("cnn1d")
    trained = local_update(model, params, x, y, spec, plan_of(20, spec), functional=functional)
    assert torch.equal(trained[: model.head.start], params[: model.head.start])
    assert (trained[-3:] != params[-3:]).all()


@pytest.mark.parametrize("functional", [False, True])
def test_the_hook_replaces_the_gradient_and_may_keep_it(functional: bool) -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp")
    params, spec = model.init(1), SPECS["momentum"]
    seen: list[Tensor] = []
    copies: list[Tensor] = []
    steps: list[int] = []

    def hook(gradient: Tensor, step: int) -> Tensor:
        seen.append(gradient)
        copies.append(gradient.clone())
        steps.append(step)
        return torch.zeros_like(gradient) if step else gradient

    plan = plan_of(len(x), spec)
    trained = local_update(model, params, x, y, spec, plan, hook, functional=functional)
    assert steps == list(range(9))
    assert all(torch.equal(a, b) for a, b in zip(seen, copies, strict=True))
    travel = sum(0.9**step for step in range(9))
    torch.testing.assert_close(trained, params - 0.05 * travel * seen[0], rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    clip=st.floats(1e-3, 10), scale=st.floats(0.01, 100), n=st.integers(1, 12), seed=st.integers(0)
)
def test_one_example_cannot_move_the_mean_gradient_by_more_than_clip_over_n(
    clip: float, scale: float, n: int, seed: int
) -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp", n, seed % 2**31)
    spec = TrainSpec(local_epochs=1, batch_size=16, clip=clip)
    params, gradients = model.init(2), []

    def keep(gradient: Tensor, step: int) -> Tensor:
        gradients.append(gradient)
        return gradient

    x = x * scale
    other = x.clone()
    other[0] = -other[0] * 3
    for data in (x, other):
        local_update(model, params, data, y, spec, plan_of(n, spec), keep)
    assert gradients[0].norm() <= clip * 1.0001
    assert (gradients[0] - gradients[1]).norm() <= 2 * clip / n * 1.001 + 1e-6


def test_clipping_by_hand_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp")
    params, clip = model.init(1), 0.8
    spec = TrainSpec(local_epochs=1, batch_size=32, lr=1.0, momentum=0.0, clip=clip)
    total, clipped = torch.zeros_like(params), 0
    for one, label in zip(x, y, strict=True):
        leaf = params.clone().requires_grad_()
        loss = F.cross_entropy(model.logits(leaf, one[None]), label[None])
        (gradient,) = torch.autograd.grad(loss, leaf)
        clipped += bool(gradient.norm() > clip)
        total += gradient * min(1.0, clip / gradient.norm().item())
    assert 0 < clipped < len(x)
    plan = plan_of(len(x), spec)
    expected = params - total / len(x)
    torch.testing.assert_close(local_update(model, params, x, y, spec, plan), expected)
    monkeypatch.setattr("latecomer.device.training.PER_EXAMPLE_FLOATS", 7 * len(params))
    torch.testing.assert_close(local_update(model, params, x, y, spec, plan), expected)


def test_it_runs_under_no_grad_and_in_double_precision() -> None:
    model, (x, y), spec = model_of("lenet"), data_of("lenet"), SPECS["momentum"]
    params, plan = model.init(1), plan_of(len(x), spec)
    expected = local_update(model, params, x, y, spec, plan)
    with torch.no_grad():
        assert torch.equal(local_update(model, params, x, y, spec, plan), expected)
    precise = local_update(model, params.double(), x.double(), y, spec, plan)
    assert precise.dtype is torch.float64
    torch.testing.assert_close(precise.float(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(local_update(model, params, x, y, spec, plan), expected)


def test_no_steps_gives_a_copy() -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp")
    params, spec = model.init(1), TrainSpec(local_epochs=0)
    trained = local_update(model, params, x, y, spec, plan_of(len(x), spec))
    assert torch.equal(trained, params)
    assert trained.data_ptr() != params.data_ptr()


def test_an_unknown_optimizer_is_named() -> None:
    model, (x, y) = model_of("mlp"), data_of("mlp")
    spec = TrainSpec(optimizer="lion")
    with pytest.raises(BadInput, match=r"lion.*sgd, adam"):
        local_update(model, model.init(0), x, y, spec, plan_of(len(x), spec))


class Spare(nn.Module):
    """A parameter that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("functional", [False, True])
def test_unused_parameters_have_no_gradient(functional: bool) -> None:
    model, spec = FlatModel(Spare, (4,), 2), TrainSpec()
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    trained = local_update(
        model, model.init(0), x, y, spec, plan_of(5, spec), functional=functional
    )
    assert torch.equal(trained[model.layout.span("spare")], torch.ones(3))

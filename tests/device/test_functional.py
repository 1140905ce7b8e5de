"""The functional run: differentiated, batched, padded with empty steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import Plan, local_update, plan_batches, task_rng

SPECS = {
    "momentum": TrainSpec(momentum=0.9, weight_decay=0.1, prox=0.3),
    "adam": TrainSpec(optimizer="adam", weight_decay=0.1),
    "clip": TrainSpec(momentum=0.5, clip=0.5),
    "head": TrainSpec(momentum=0.5, last_layer_only=True),
}
SPECS = {name: replace(spec, lr=0.05, local_epochs=2, batch_size=4) for name, spec in SPECS.items()}


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", SPECS)
def test_its_derivative_is_that_of_finite_differences(kind: str) -> None:
    model, spec = FlatModel(smooth, (3,), 2), SPECS[kind]
    params = model.init(0).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    plan = plan_batches(6, spec, task_rng(0, 0, 0))
    weights = torch.linspace(0.5, 1.5, len(params), dtype=torch.float64)

    def outcome(x: Tensor, params: Tensor) -> Tensor:
        return local_update(model, params, x, y, spec, plan, functional=True) @ weights

    assert torch.autograd.gradcheck(outcome, (x.requires_grad_(), params.requires_grad_()))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 8, 8)), ("cnn1d", (8, 2))])
def test_derivatives_of_networks_with_dead_units_are_finite(
    name: str, shape: tuple[int, ...], kind: str
) -> None:
    model, spec = flat_model(name, shape, 3), SPECS[kind]
    x = (0.1 * torch.randn(6, *shape)).requires_grad_()
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    plan = plan_batches(6, spec, task_rng(0, 0, 0))
    trained = local_update(model, model.init(0), x, y, spec, plan, functional=True)
    (gradient,) = torch.autograd.grad(trained.sum(), x)
    assert gradient.isfinite().all()
    assert gradient.any()


def test_the_mask_may_be_learned_weights() -> None:
    model = FlatModel(smooth, (3,), 2)
    params, x = model.init(0).double(), torch.eye(3, dtype=torch.float64)
    y, spec = torch.tensor([0, 1, 0]), TrainSpec(lr=0.3)
    order = torch.arange(3).expand(2, 3)

    def outcome(scores: Tensor) -> Tensor:
        plan = Plan(order, scores.softmax(0).expand(2, 3))
        return local_update(model, params, x, y, spec, plan, functional=True).sum()

    scores = torch.tensor([0.1, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(outcome, scores)


def stacked(
    model: FlatModel, shape: tuple[int, ...], spec: TrainSpec, devices: int, n: int
) -> tuple[Tensor, Tensor, Tensor, Plan]:
    generator = torch.Generator().manual_seed(0)
    params = torch.stack([model.init(device) for device in range(devices)])
    x = torch.randn(devices, n, *shape, generator=generator)
    y = torch.randint(0, 3, (devices, n), generator=generator)
    plans = [plan_batches(n, spec, task_rng(0, device, 0)) for device in range(devices)]
    return params, x, y, Plan(*(torch.stack(part) for part in zip(*plans, strict=True)))


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    ("name", "shape"), [("mlp", (6,)), ("lenet", (1, 8, 8)), ("cnn1d", (8, 2))]
)
def test_a_batch_of_devices_equals_one_by_one(name: str, shape: tuple[int, ...], kind: str) -> None:
    model, spec = flat_model(name, shape, 3, width=0.5), SPECS[kind]
    params, x, y, plan = stacked(model, shape, spec, devices=3, n=10)

    def one(params: Tensor, x: Tensor, y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
        return local_update(model, params, x, y, spec, Plan(order, mask), functional=True)

    together = torch.func.vmap(one)(params, x, y, *plan)
    for device in range(3):
        alone = local_update(
            model,
            params[device],
            x[device],
            y[device],
            spec,
            Plan(plan.order[device], plan.mask[device]),
        )
        torch.testing.assert_close(together[device], alone, rtol=1e-5, atol=1e-5)


def test_a_small_resnet_can_be_batched_too() -> None:
    model = flat_model("resnet18", (1, 8, 8), 3, width=0.05)
    spec = replace(SPECS["momentum"], local_epochs=1, lr=0.01)
    params, x, y, plan = stacked(model, (1, 8, 8), spec, devices=2, n=6)
    together = torch.func.vmap(
        lambda p, x, y, order, mask: local_update(
            model, p, x, y, spec, Plan(order, mask), functional=True
        )
    )(params, x, y, *plan)
    alone = local_update(model, params[1], x[1], y[1], spec, Plan(plan.order[1], plan.mask[1]))
    torch.testing.assert_close(together[1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_an_empty_step_is_no_step(kind: str, functional: bool) -> None:
    model, spec = flat_model("mlp", (6,), 3), SPECS[kind]
    params, x, y, plan = stacked(model, (6,), spec, devices=1, n=10)
    params, x, y, plan = params[0], x[0], y[0], Plan(plan.order[0], plan.mask[0])
    expected = local_update(model, params, x, y, spec, plan, functional=functional)
    width = plan.order.shape[1]
    holes = Plan(plan.order.new_zeros(1, width), plan.mask.new_zeros(1, width))
    for position in (0, 2, len(plan.order)):
        padded = Plan(
            *(
                torch.cat([part[:position], hole, part[position:]])
                for part, hole in zip(plan, holes, strict=True)
            )
        )
        trained = local_update(
            model, params, x, y, spec, padded, functional=functional, ragged=True
        )
        assert torch.equal(trained, expected)


def test_devices_with_different_numbers_of_steps_share_a_batch() -> None:
    model, spec = flat_model("mlp", (6,), 3), SPECS["adam"]
    params, x, y, plan = stacked(model, (6,), spec, devices=2, n=8)
    mask = plan.mask.clone()
    mask[1, 2:] = 0
    together = torch.func.vmap(
        lambda p, x, y, order, mask: local_update(
            model, p, x, y, spec, Plan(order, mask), functional=True, ragged=True
        )
    )(params, x, y, plan.order, mask)
    for device, steps in ((0, 4), (1, 2)):
        short = Plan(plan.order[device, :steps], plan.mask[device, :steps])
        alone = local_update(model, params[device], x[device], y[device], spec, short)
        torch.testing.assert_close(together[device], alone, rtol=1e-5, atol=1e-6)

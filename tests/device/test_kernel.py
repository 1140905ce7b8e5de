"""The compiled kernel against `local_update` in plain torch: the same numbers, to rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.device.program import program_of
from latecomer.device.training import Plan, local_update, plan_batches, resumed_update, task_rng

SGD = TrainSpec(local_epochs=2, batch_size=8, lr=0.05, momentum=0.9)
SPECS = {
    "momentum": SGD,
    "plain": replace(SGD, momentum=0.0),
    "decay": replace(SGD, weight_decay=0.1),
    "prox": replace(SGD, prox=0.5),
    "both": replace(SGD, weight_decay=0.1, prox=0.5, lr_scale=0.5),
}
NETWORKS = {
    "mlp": ("mlp", (30,)),
    "mlp on images": ("mlp", (1, 6, 6)),
    "cnn1d": ("cnn1d", (20, 3)),
    "cnn1d odd length": ("cnn1d", (27, 3)),
    "cnn1d on features": ("cnn1d", (40,)),
    "lenet small": ("lenet", (1, 8, 8)),
    "lenet": ("lenet", (1, 28, 28)),
    "lenet colour": ("lenet", (3, 32, 32)),
    "lenet oblong": ("lenet", (2, 12, 20)),
}


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Backwards(nn.Sequential):
    def forward(self, x):
        return -super().forward(x)


def both(model: FlatModel, spec: TrainSpec, plan: Plan, x, y):
    params = model.init(1)
    kernel = compiled_kernel(model)
    assert isinstance(kernel, CompiledKernel)
    assert kernel.covers(spec)
    model.kernel = None
    plain = local_update(model, params, x, y, spec, plan)
    model.kernel = kernel
    fast = local_update(model, params, x, y, spec, plan)
    return params, plain, fast


def agree(params, plain, fast):
    moved = (plain - params).abs().max()
    assert moved > 1e-3
    torch.testing.assert_close(fast, plain, rtol=0, atol=1e-5 * moved.item() + 1e-6)


def data(shape, n=21, classes=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, *shape, generator=generator)
    return x, torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_plain_network(name):
    kind, shape = NETWORKS[name]
    x, y = data(shape)
    agree(
        *both(
            flat_model(kind, shape, 4, (9, 5)), SGD, plan_batches(21, SGD, task_rng(0, 0, 0)), x, y
        )
    )


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_every_program(kind, name):
    x, y = data((1, 8, 8))
    spec = SPECS[name]
    plan = plan_batches(21, spec, task_rng(0, 0, 0))
    agree(*both(flat_model(kind, (1, 8, 8), 4, (9, 5)), spec, plan, x, y))


@pytest.mark.parametrize("clip", [0.05, 1.0, 100.0])
def test_clipping_per_example(clip):
    spec = replace(SGD, clip=clip)
    x, y = data((30,))
    plan = plan_batches(21, spec, task_rng(0, 0, 0))
    agree(*both(flat_model("mlp", (30,), 4, (9, 5)), spec, plan, x, y))


def test_equal_values_in_a_pooling_window_go_to_the_first_as_in_torch():
    """A flat background makes ties everywhere."""
    x, y = data((1, 28, 28))
    x = (x > 1.5).float()
    plan = plan_batches(21, SGD, task_rng(0, 0, 0))
    agree(*both(flat_model("lenet", (1, 28, 28), 4), SGD, plan, x, y))


def test_empty_steps_change_nothing():
    model = flat_model("mlp", (30,), 4, (9, 5))
    x, y = data((30,))
    plan = plan_batches(21, SGD, task_rng(0, 0, 0))
    longer = Plan(
        torch.cat([plan.order, plan.order[:2]]), torch.cat([plan.mask, torch.zeros(2, 8)])
    )
    _, _, short = both(model, SGD, plan, x, y)
    _, _, long = both(model, SGD, longer, x, y)
    assert torch.equal(short, long)


def test_inputs_are_left_alone_and_results_repeat_to_the_bit():
    model = flat_model("lenet", (1, 8, 8), 4)
    x, y = data((1, 8, 8))
    plan = plan_batches(21, SGD, task_rng(0, 0, 0))
    before = [t.clone() for t in (x, y, *plan)]
    params, _, one = both(model, SGD, plan, x, y)
    _, _, two = both(model, SGD, plan, x, y)
    assert torch.equal(one, two)
    assert torch.equal(params, model.init(1))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, y, *plan), strict=True))


def test_a_users_own_plain_network_is_known():
    def build():
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4))

    x, y = data((1, 8, 8))
    plan = plan_batches(21, SGD, task_rng(0, 0, 0))
    agree(*both(FlatModel(build, (1, 8, 8), 4), SGD, plan, x, y))


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Conv2d(1, 3, 3, stride=2), nn.Flatten(), nn.Linear(27, 4)],
        lambda: [nn.Conv2d(1, 3, 3, padding="same"), nn.Flatten(), nn.Linear(192, 4)],
        lambda: [nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4)],
        lambda: [nn.Flatten(), nn.Linear(64, 4, bias=False)],
        lambda: [nn.MaxPool2d(3, stride=2), nn.Flatten(), nn.Linear(9, 4)],
        lambda: [nn.Flatten(), nn.Linear(64, 4), nn.ReLU()],
        lambda: [nn.Flatten(2), nn.Flatten(), nn.Linear(64, 4)],
        lambda: [nn.Flatten(), Doubled(64, 4)],
    ],
)
def test_other_networks_are_left_to_torch(layers):
    model = FlatModel(lambda: nn.Sequential(*layers()), (1, 8, 8), 4)
    assert program_of(model.module, model.layout, (1, 8, 8)) is None
    assert "does not support" in str(compiled_kernel(model))


def test_what_the_kernel_does_not_cover():
    kernel = compiled_kernel(flat_model("lenet", (1, 8, 8), 4))
    assert isinstance(kernel, CompiledKernel)
    assert not kernel.covers(replace(SGD, optimizer="adam"))
    assert not kernel.covers(replace(SGD, last_layer_only=True))
    assert not kernel.covers(replace(SGD, clip=1.0))


def test_a_subclass_may_compute_anything_and_is_left_to_torch():
    model = FlatModel(lambda: Backwards(nn.Flatten(), nn.Linear(64, 4)), (1, 8, 8), 4)
    assert program_of(model.module, model.layout, (1, 8, 8)) is None


def test_a_layer_used_twice_counts_twice():
    def build():
        relu = nn.ReLU()
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 4)
        )

    x, y = data((1, 8, 8))
    plan = plan_batches(21, SGD, task_rng(0, 0, 0))
    agree(*both(FlatModel(build, (1, 8, 8), 4), SGD, plan, x, y))


def test_diverging_training_is_seen_as_such():
    model, spec = flat_model("mlp", (30,), 4, (9, 5)), replace(SGD, lr=1e20)
    x, y = data((30,))
    _, plain, fast = both(model, spec, plan_batches(21, spec, task_rng(0, 0, 0)), x, y)
    assert not torch.isfinite(plain).all()
    assert not torch.isfinite(fast).all()


@pytest.mark.parametrize("name", SPECS)
def test_training_resumed_after_a_pass_gives_the_same_bits(name):
    """Momentum and the anchor of `prox` must be carried over."""
    model, spec = flat_model("mlp", (30,), 4), SPECS[name]
    found = compiled_kernel(model)
    assert isinstance(found, CompiledKernel)
    model.kernel = found
    x, y = data((30,))
    plan = plan_batches(21, spec, task_rng(0, 0, 0))
    params, half = model.init(1), len(plan.order) // 2
    first, second = Plan(*(p[:half] for p in plan)), Plan(*(p[half:] for p in plan))
    middle, state = resumed_update(model, params, params, None, x, y, spec, first)
    stored = [t.clone() for t in (middle, *state)]
    end, _ = resumed_update(model, middle, params, state, x, y, spec, second)
    assert torch.equal(end, local_update(model, params, x, y, spec, plan))
    assert all(torch.equal(a, b) for a, b in zip(stored, (middle, *state), strict=True))

"""Training many tasks at once gives what training each alone gives."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import TrainSpec
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.training import plan_batches, reason_not_to_batch, task_rng
from latecomer.engines.trainers import Batched, OneByOne, batch_size, stack_plans
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.recipe import build_strategy

DEVICES = 12
SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.1, momentum=0.9)


def clients_and_model(kind="mlp"):
    """Devices with 1 to 12 examples: ragged in steps and in width."""
    model = flat_model(kind, (1, 8, 8), 3, (8,))
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for device in range(DEVICES):
        x = torch.randn(device + 1, 1, 8, 8, generator=generator)
        y = torch.randint(0, 3, (device + 1,), generator=generator)
        clients[device] = Client(device, model, x, y, seed=5)
    return clients, model


def engine_with(size, strategy="fedasync", crash=0.0, kind="mlp"):
    clients, model = clients_and_model(kind)
    trainer = OneByOne(clients) if size == 0 else Batched(clients, size)
    server = Server(model.init(0), build_strategy(strategy), SPEC)
    fleet = make_fleet("tiers", DEVICES, seed=2, overrides={"crash": crash})
    return VirtualEngine(server, fleet, trainer, clients)


def run(engine, updates=100):
    engine.run(Bounds(updates=updates), lambda: True)
    return engine.server.store.head_params()


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff", "semi-async", "fedavg"])
def test_a_whole_run_is_the_same_to_1e_5_whatever_the_batch_size(strategy):
    alone = run(engine_with(0, strategy), 80)
    for size in (1, 3, 32):
        together = run(engine_with(size, strategy), 80)
        assert (alone - together).abs().max() / alone.abs().max() < 1e-5


def test_convolutions_too():
    alone, together = (run(engine_with(size, kind="lenet"), 24) for size in (0, 8))
    assert (alone - together).abs().max() / alone.abs().max() < 1e-5


def test_lost_tasks_are_never_trained_and_nothing_is_left_behind():
    engine = engine_with(8, crash=0.3)
    run(engine)
    trainer = engine.trainer
    waiting = {number for some in trainer._waiting.values() for number in some}
    assert not waiting & set(trainer._ready)
    assert waiting | set(trainer._ready) <= set(engine.server.open_tasks)


@pytest.mark.parametrize("after", [1, 20, 77])
def test_resuming_finds_the_results_of_the_batch(after):
    whole = engine_with(8)
    run(whole, after)
    first = engine_with(8)
    run(first, after)
    tree, tensors = encode({"server": first.server.state(), "engine": first.state()})
    state = decode(json.loads(json.dumps(tree)), storable(tensors))
    second = engine_with(8)
    second.server.restore(state["server"])
    second.restore(state["engine"])
    assert torch.equal(run(second), run(whole))


def test_forgotten_tasks_leave_no_trace():
    clients, model = clients_and_model()
    trainer = Batched(clients, 4)
    server = Server(model.init(0), build_strategy("fedasync"), SPEC)
    engine = VirtualEngine(server, make_fleet("tiers", DEVICES), trainer, clients)
    engine.run(Bounds(updates=1), lambda: True)
    for number in list(server.open_tasks):
        trainer.forget(number)
    assert not trainer._ready
    assert not any(trainer._waiting.values())


def test_plans_of_different_length_are_padded_with_empty_steps():
    plans = [plan_batches(n, SPEC, task_rng(0, n, 0)) for n in (3, 9)]
    stacked, ragged = stack_plans(plans)
    assert stacked.order.shape == (2, 6, 4)
    assert ragged
    assert stacked.mask.sum((1, 2)).tolist() == [6, 18]
    assert not stack_plans(plans[:1])[1]


def test_batch_size_follows_the_memory():
    model = flat_model("mlp", (100,), 3, (50,))
    floats = 8 * model.layout.size + 4 * 10 * 100
    assert batch_size(model, SPEC, 10, 5 * 4 * floats / 2**20) == 5
    assert batch_size(model, SPEC, 10, 1e-6) == 1
    assert batch_size(model, SPEC, 10, 1e9) == 32
    clipped = replace(SPEC, clip=1.0)
    floats += 4 * model.layout.size  # the gradients of a mini-batch of four
    assert batch_size(model, clipped, 10, 5 * 4 * floats / 2**20) == 5


def test_a_network_that_cannot_be_batched_is_found_out():
    class Choosy(nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.mean() > 0 else -x)

    model = FlatModel(lambda: Choosy(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8), 3)
    assert "cannot be batched" in reason_not_to_batch(model)
    assert reason_not_to_batch(flat_model("mlp", (4,), 2)) is None

"""Devices with a memory do their tasks in order, however lazily and batched these are trained."""

import json
from dataclasses import replace

import pytest
import torch

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import MAIN, Task, TrainSpec
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet, with_lateness
from latecomer.fleet.late import lateness_from_epochs
from latecomer.strategies.recipe import build_strategy

DEVICES = 8
SPEC = TrainSpec(local_epochs=1, batch_size=4, lr=0.1, momentum=0.5)
REMEMBERS = {
    "aso-fed": {"beta": 0.3},
    "paflm": {"threshold": 30.0},
}


def clients_and_model():
    model = flat_model("mlp", (5,), 3, (6,))
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for device in range(DEVICES):
        x = torch.randn(device + 2, 5, generator=generator)
        y = torch.randint(0, 3, (device + 2,), generator=generator)
        clients[device] = Client(device, model, x, y, seed=5)
    return clients, model


def trainer_of(size):
    clients, _ = clients_and_model()
    return OneByOne(clients) if size == 0 else Batched(clients, size)


def tasks_of_one_device(spec, count=4):
    _, model = clients_and_model()
    return [Task(10 + n, 3, n, MAIN, n, spec, model.init(n)) for n in range(count)]


def engine_with(strategy, size=0, crash=0.0, **options):
    """Half of the fleet works in a pipeline: several of its uploads are under way at once."""
    trainer = trainer_of(size)
    _, model = clients_and_model()
    server = Server(model.init(0), build_strategy(strategy, options), SPEC)
    fleet = make_fleet("tiers", DEVICES, seed=2, overrides={"crash": crash})
    fleet = with_lateness(fleet, range(4), lateness_from_epochs("in-flight", 3.0, 5.0, gamma=True))
    return VirtualEngine(server, fleet, trainer, range(DEVICES))


def run(engine, updates=120):
    engine.run(Bounds(updates=updates), lambda: True)
    return engine.server.store.head_params()


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
@pytest.mark.parametrize("asks", [{"balance": 0.5}, {"lazy": 2.0, "accumulate_residual": True}])
def test_the_order_of_arrivals_does_not_matter(asks, order, size):
    tasks, memory = tasks_of_one_device(replace(SPEC, **asks)), {}
    clients, _ = clients_and_model()
    expected = [clients[3].perform(task, memory).delta for task in tasks]
    trainer = trainer_of(size)
    for task in tasks:
        trainer.expect(task, 0.0)
    found = {number: trainer.update(tasks[number]).delta for number in order}
    for number, delta in enumerate(expected):
        assert (delta is None) == (found[number] is None)
        assert delta is None or torch.equal(delta, found[number])
    assert any(delta is None for delta in expected) == ("lazy" in asks)


def test_lost_and_forgotten_tasks_leave_no_trace():
    tasks = tasks_of_one_device(replace(SPEC, balance=0.5))
    clients, _ = clients_and_model()
    memory = {}
    expected = [clients[3].perform(tasks[number], memory).delta for number in (0, 3)]
    trainer = trainer_of(0)
    for number in (0, 2, 3):  # the second is lost
        trainer.expect(tasks[number], 0.0)
    trainer.forget(tasks[2].id)
    found = {number: trainer.update(tasks[number]).delta for number in (3, 0)}
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[3], expected[1])


def test_a_result_is_kept_only_until_it_is_asked_for():
    trainer, tasks = trainer_of(4), tasks_of_one_device(replace(SPEC, balance=0.5))
    for task in tasks:
        trainer.expect(task, 0.0)
    trainer.update(tasks[3])
    trainer.forget(tasks[0].id)
    for task in tasks[1:3]:
        trainer.update(task)
    assert not trainer.state()["ready"]
    assert list(trainer.state()["memory"]) == [3]


@pytest.mark.parametrize("strategy", list(REMEMBERS))
def test_batches_leave_devices_with_a_memory_alone(strategy):
    alone, batched = (engine_with(strategy, size, **REMEMBERS[strategy]) for size in (0, 4))
    assert torch.equal(run(alone), run(batched))


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("strategy", list(REMEMBERS))
@pytest.mark.parametrize("after", [1, 33, 90])
def test_resuming_finds_the_memory(strategy, after, size):
    options = REMEMBERS[strategy]
    whole = engine_with(strategy, size, crash=0.1, **options)
    run(whole, after)
    first = engine_with(strategy, size, crash=0.1, **options)
    run(first, after)
    tree, tensors = encode({"server": first.server.state(), "engine": first.state()})
    state = decode(json.loads(json.dumps(tree)), storable(tensors))
    second = engine_with(strategy, size, crash=0.1, **options)
    second.server.restore(state["server"])
    second.restore(state["engine"])
    assert torch.equal(run(second), run(whole))
    assert second.bytes_saved == whole.bytes_saved
    assert (second.bytes_saved > 0) == (strategy == "paflm")


def test_the_pipeline_trains_tasks_before_they_arrive():
    """The tests above would mean less if uploads never overtook each other."""
    engine, early = engine_with("aso-fed", beta=0.3), []
    engine.run(
        Bounds(updates=120), lambda: early.append(len(engine.trainer.state()["ready"])) is None
    )
    assert sum(count > 0 for count in early) > 10


def test_a_run_without_memory_keeps_none():
    engine = engine_with("fedasync")
    run(engine)
    assert engine.trainer.state() == {"memory": {}, "ready": {}}


def test_programs_that_differ_by_task_leave_nothing_behind():
    engine = engine_with("aso-fed", size=4, beta=0.0)
    run(engine)
    waiting = engine.trainer._waiting
    assert all(waiting.values())
    assert len(waiting) <= len(engine.server.open_tasks)

"""IFCA: k models, each device trains the one that fits its data best."""

import pytest
import torch
from torch import nn

from commands import sends
from latecomer.core.messages import MAIN, Arrived, Joined, Offer, Send, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.strategies.recipe import build_strategy
from toy import NETWORK, SIZE, ToyRun, toy_fleet, toy_run, toy_server


def round_of(server, tasks, answers):
    """Everybody answers: device -> (choice, delta, examples)."""
    updates = []
    for task in tasks:
        choice, value, examples = answers[task.device]
        delta = torch.full((SIZE,), value)
        updates.append(Arrived(task.device, Update(task.id, delta, examples, choice=choice)))
    return sends(server.handle(*updates))


def test_every_device_gets_all_models_and_the_bytes_count():
    server = toy_server("ifca", {"clusters": 3})
    commands = server.handle(Joined(0), Joined(1))
    tasks = sends(commands)
    assert [o.lineage for o in tasks[0].offers] == ["cluster-1", "cluster-2"]
    starts = [tasks[0].params, *(o.params for o in tasks[0].offers)]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    assert torch.equal(starts[2], NETWORK.init(7 + 2))
    lines = [c.fields for c in commands if not isinstance(c, Send) and c.kind == "dispatch"]
    assert [line["bytes"] for line in lines] == [3 * 4 * SIZE] * 2


def test_each_model_becomes_the_mean_of_those_who_took_it():
    """Devices 0 and 1 (1 and 3 examples) take the main model, device 2 the other one."""
    server = toy_server("ifca")
    tasks = sends(server.handle(*(Joined(d) for d in range(3))))
    first, second = tasks[0].params, tasks[0].offers[0].params
    round_of(server, tasks, {0: (0, 1.0, 1), 1: (0, 2.0, 3), 2: (1, 5.0, 9)})
    assert server.store.head_params(MAIN).tolist() == pytest.approx((first + 1.75).tolist())
    assert server.store.head_params("cluster-1").tolist() == pytest.approx((second + 5).tolist())
    assert [server.lineage_of(d) for d in range(3)] == [MAIN, MAIN, "cluster-1"]


def test_a_model_that_nobody_takes_stays_as_it_is():
    server = toy_server("ifca")
    tasks = sends(server.handle(Joined(0), Joined(1)))
    before = server.store.head_params("cluster-1").clone()
    round_of(server, tasks, {0: (0, 1.0, 1), 1: (0, 2.0, 1)})
    assert torch.equal(server.store.head_params("cluster-1"), before)


def test_a_device_may_move_to_another_cluster():
    server = toy_server("ifca")
    tasks = sends(server.handle(Joined(0), Joined(1)))
    tasks = round_of(server, tasks, {0: (1, 1.0, 1), 1: (0, 2.0, 1)})
    assert server.lineage_of(0) == "cluster-1"
    round_of(server, tasks, {0: (0, 1.0, 1), 1: (0, 2.0, 1)})
    assert server.lineage_of(0) == MAIN


def test_all_sent_versions_are_kept_while_the_task_is_open_and_not_longer():
    server = toy_server("ifca", {"clusters": 3})
    tasks = sends(server.handle(Joined(0), Joined(1)))
    assert [server.store.pins(v) for v in tasks[0].versions] == [2, 2, 2]
    server.handle(Arrived(0, Update(tasks[0].id, torch.ones(SIZE), 1, choice=2)))
    assert [server.store.pins(v) for v in tasks[0].versions] == [1, 1, 1]


@pytest.mark.parametrize("choice", [2, -1, True, 0.0, "0"])
def test_a_choice_that_was_not_offered_is_refused(choice):
    server = toy_server("ifca")
    (task,) = sends(server.handle(Joined(0)))
    update = Update(task.id, torch.ones(SIZE), 1, choice=choice)
    notes = [c for c in server.handle(Arrived(0, update)) if not isinstance(c, Send)]
    assert notes[0].kind == "refusal"
    assert "0 to 1" in notes[0].fields["reason"]


def test_one_cluster_is_fedavg_bit_for_bit():
    assert toy_run("ifca", clusters=1).heads() == toy_run("fedavg").heads()


def test_a_checkpoint_in_mid_round_keeps_the_offers():
    whole = ToyRun(toy_server("ifca"), toy_fleet())
    whole.until(7)
    twin = whole.carried_over(ToyRun(toy_server("ifca"), toy_fleet()))
    assert [t.versions for t in twin.server.open_tasks.values()] == [
        t.versions for t in whole.server.open_tasks.values()
    ]


def two_worlds():
    """Two devices with the same inputs and opposite labels, and a model for each."""
    model = FlatModel(lambda: nn.Linear(2, 2), (2,), 2)
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    clients = {0: Client(0, model, x, y, 5), 1: Client(1, model, x, 1 - y, 5)}
    return model, clients


@pytest.mark.parametrize("batched", [False, True])
def test_devices_of_two_worlds_part_company(batched):
    model, clients = two_worlds()
    trainer = Batched(clients, 4) if batched else OneByOne(clients)
    spec = TrainSpec(lr=0.5)
    server = Server(
        model.init(3), build_strategy("ifca"), spec, seed=3, networks=lambda submodel: model
    )
    run = ToyRun(server, toy_fleet(2), trainer=trainer)
    run.until(20)
    assert server.lineage_of(0) != server.lineage_of(1)
    for device, client in clients.items():
        logits = model.logits(server.store.head_params(server.lineage_of(device)), client.x)
        assert (logits.argmax(1) == client.y).float().mean() > 0.9


def test_the_device_takes_the_model_of_least_loss():
    _, clients = two_worlds()
    good, bad = torch.tensor([-4.0, 0, 4, 0, 0, 0]), torch.tensor([4.0, 0, -4, 0, 0, 0])
    task = Task(0, 0, 0, MAIN, 0, TrainSpec(), bad, offers=(Offer("other", 1, good),))
    assert clients[0].choose(task) == 1
    assert clients[1].choose(task) == 0
    update = clients[0].perform(task)
    assert update.choice == 1
    assert update.delta.abs().max() < 1  # it went on from the good one
    # Two looks at every example beside two passes over them.
    assert clients[0].examples(task) == pytest.approx(20 * (2 + 2 / 3))

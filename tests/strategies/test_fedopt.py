"""Hand-worked steps of the optimisers on the server, and what becomes of their moments."""

import math

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Contribution, Joined, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.papers.fedopt import (
    ServerOptimiser,
    adam,
    momentum,
)
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def heads_after(strategy, *deltas):
    """The model after each round of two devices, whose mean delta is this."""
    server = Server(torch.zeros(1), strategy, TrainSpec())
    tasks = sends(server.handle(Joined(0), Joined(1)))
    heads = []
    for delta in deltas:
        # 3 examples of delta + 1 and 1 example of delta - 3
        own = [(delta + 1, 3), (delta - 3, 1)]
        tasks = sends(
            server.handle(
                *(
                    Arrived(task.device, Update(task.id, torch.tensor([value]), examples))
                    for task, (value, examples) in zip(tasks, own, strict=True)
                )
            )
        )
        heads.append(server.store.head_params().item())
    return heads


def test_fedavgm_by_hand():
    # v = 2, then 0.5 * 2 + 2 = 3, then 1.5 - 1 = 0.5; the model moves by half of it
    assert heads_after(
        build_strategy("fedavgm", {"beta": 0.5, "server_lr": 0.5}), 2.0, 2.0, -1.0
    ) == [1.0, 2.5, 2.75]


def test_fedadagrad_by_hand():
    # v = 9 + 16 = 25: 4 / (5 + 3) = 1/2; v = 25 + 144 = 169: 12 / (13 + 3) = 3/4
    assert heads_after(build_strategy("fedadagrad", {"server_lr": 2.0, "tau": 3.0}), 4.0, 12.0) == [
        1.0,
        2.5,
    ]


def test_fedyogi_by_hand():
    found = heads_after(
        build_strategy("fedyogi", {"server_lr": 1.0, "beta1": 0.5, "beta2": 0.5, "tau": 1.0}),
        4.0,
        2.0,
    )
    # m = 2, v = 1 + 8 = 9: 2 / (3 + 1). Then m = 1 + 1, v = 9 - 2 = 7, as 4 is below 9.
    assert found == pytest.approx([0.5, 0.5 + 2 / (math.sqrt(7) + 1)])


def test_fedadam_by_hand():
    found = heads_after(
        build_strategy("fedadam", {"server_lr": 1.0, "beta1": 0.5, "beta2": 0.75, "tau": 1.0}),
        1.0,
        3.0,
    )
    # m = 1/2, v = 3/4 + 1/4 = 1: 0.5 / (1 + 1). Then m = 1/4 + 3/2, v = 3/4 + 9/4 = 3.
    assert found == pytest.approx([0.25, 0.25 + 1.75 / (math.sqrt(3) + 1)])


def test_fedadam_keeps_a_share_of_its_second_moment():
    found = heads_after(
        build_strategy("fedadam", {"server_lr": 2.0, "beta1": 0.5, "beta2": 0.75, "tau": 2.0}),
        2.0,
        6.0,
    )
    # v begins at 4. m = 1, v = 3 + 1 = 4: 1 / (2 + 2). Then m = 1/2 + 3, v = 3 + 9 = 12.
    assert found == pytest.approx([0.5, 0.5 + 2 * 3.5 / (math.sqrt(12) + 2)])


def sent(*delta, submodel=None):
    params, delta = torch.zeros(len(delta)), torch.tensor(delta)
    task = Task(0, 0, 0, "main", 0, TrainSpec(), params, submodel)
    return Contribution(task, Update(0, delta, 1), params, delta, "main", 0)


def test_coordinates_that_nobody_trained_keep_value_and_moments():
    first = Submodel("first", torch.tensor([0]))
    optimiser = ServerOptimiser(momentum(0.5), mean=True)
    head = optimiser("main", torch.zeros(2), [sent(2.0, 4.0), sent(4.0, submodel=first)], step=1.0)
    assert head.tolist() == [3.0, 4.0]
    head = optimiser("main", head, [sent(1.0, submodel=first)], step=1.0)
    assert head.tolist() == [5.5, 4.0]  # v = 1.5 + 1, and the second does not roll on by 2
    head = optimiser("main", head, [sent(0.0, 0.0)], step=1.0)
    assert head.tolist() == [6.75, 6.0]  # its v = 4 has waited


def test_a_fork_starts_with_the_moments_of_its_parent():
    strategy = Strategy(merge=Buffer(1, combine=ServerOptimiser(momentum(0.5), mean=False)))
    server = Server(torch.zeros(1), strategy, TrainSpec())

    def moments():
        kept = server.parts.state()["merge.combine"]["moments"]
        return {name: velocity.item() for name, (velocity,) in kept.items()}

    (task,) = sends(server.handle(Joined(0)))
    (task,) = sends(server.handle(Arrived(0, Update(task.id, torch.tensor([2.0]), 1))))
    server.fork("main", "child")
    assert moments() == {"main": 2.0, "child": 2.0}
    server.handle(Arrived(0, Update(task.id, torch.tensor([8.0]), 1)))
    assert moments() == {"main": 9.0, "child": 2.0}
    server.absorb("main", "child")
    assert moments() == {"main": 9.0}


def test_a_step_leaves_the_old_moments_as_they_were():
    start, step = adam(0.9, 0.99, 1e-3)
    moments = start(torch.zeros(2))
    before = [m.clone() for m in moments]
    step(moments, torch.ones(2))
    assert all(torch.equal(m, b) for m, b in zip(moments, before, strict=True))


def test_they_close_rounds_as_fedavg_does():
    plain = toy_run("fedavg", 60)
    for name in ("fedavgm", "fedadam", "fedyogi", "fedadagrad"):
        run = toy_run(name, 60)
        assert [t for t, _ in run.lines("commit")] == [t for t, _ in plain.lines("commit")]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavgm", {"beta": 1.0}),
        ("fedadam", {"beta2": 1.0}),
        ("fedyogi", {"beta1": -0.1}),
        ("fedadagrad", {"tau": 0.0}),
    ],
)
def test_a_bad_option_is_named(name, options):
    with pytest.raises(BadInput, match=next(iter(options))):
        build_strategy(name, options)

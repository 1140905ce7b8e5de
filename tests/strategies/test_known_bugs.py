"""Bugs that other frameworks have had, each as a test that fails with the bug."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    Arrived,
    Failed,
    Joined,
    Left,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def answer(task, *delta):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), 1))


def late_arrival(strategy, commits):
    """The log line of an update with a staleness of `commits`."""
    server = Server(torch.zeros(1), strategy, TrainSpec())
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    for _ in range(commits):
        (fast,) = sends(server.handle(answer(fast, 0.0)))
    (line,) = logged(server.handle(answer(slow, 1.0)), "arrival")
    assert line["staleness"] == commits
    return line


def test_a_mixing_weight_does_not_compound_over_updates():
    """Plato's FedAsync: mixing *= s(tau), kept for the next update; it sinks to zero."""
    lines = [fields for _, fields in toy_run("fedasync", 300, alpha=0.6, p=0.5).lines("arrival")]
    assert max(line["staleness"] for line in lines) > 3
    for line in lines:
        assert line["weight"] == pytest.approx(0.6 * (1 + line["staleness"]) ** -0.5)


@pytest.mark.parametrize(("late", "weight"), [(0, 1.0), (1, 0.7071068), (3, 0.5), (8, 1 / 3)])
def test_the_root_is_over_one_plus_staleness(late, weight):
    """Not 1 / (1 + sqrt(tau)), which is 0.5 at 1 and 0.37 at 3."""
    assert late_arrival(fedbuff(size=1), late)["weight"] == pytest.approx(weight)


@pytest.mark.parametrize(("late", "weight"), [(2, 0.6), (3, 0.6 / 1.1), (4, 0.5), (12, 0.3)])
def test_a_hinge_never_raises_a_weight(late, weight):
    """Not 1 / (p (tau - b)), which is 10 just past b with this p."""
    hinge = fedasync(alpha=0.6, decay="hinge", p=0.1, b=2.0)
    assert late_arrival(hinge, late)["weight"] == pytest.approx(weight)


def test_staleness_is_counted_from_the_base_not_from_the_last_upload():
    """A device that paused between two tasks is as fresh as the model it was sent."""
    server = Server(torch.zeros(1), fedasync(), TrainSpec())
    one, two = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(one, 1.0), Left(0))  # its last upload, at version 1
    for _ in range(4):
        (two,) = sends(server.handle(answer(two, 1.0)))
    (one,) = sends(server.handle(Joined(0)))
    assert one.version == 5
    server.handle(answer(two, 1.0))
    (line,) = logged(server.handle(answer(one, 1.0)), "arrival")
    assert line["staleness"] == 1


def test_a_buffered_delta_is_taken_against_its_base_not_against_the_head():
    """FADAS as published trains from an old model and takes the difference to today's."""
    server = Server(torch.zeros(1), fedbuff(size=2, decay="constant"), TrainSpec())
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    (fast,) = sends(server.handle(answer(fast, 5.0)))
    (fast,) = sends(server.handle(answer(fast, 5.0)))
    assert server.store.head_params().item() == 5.0
    server.handle(answer(slow, 1.0), answer(fast, 0.0))
    assert server.store.head_params().item() == 5.5  # and not 5 + (1 - 5) / 2


@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "semi-async",
        "fedasync",
        "fedbuff",
        "robust-fedbuff",
        "robust-quorum",
        "fedavgm",
        "fedadam",
        "fadas",
        "ca2fl",
        "asyncfeded",
    ],
)
def test_a_device_whose_task_failed_gets_another_one(name):
    server = Server(torch.zeros(1), build_strategy(name), TrainSpec())
    tasks = {task.device: task for task in sends(server.handle(*map(Joined, range(3))))}
    lost = tasks.pop(2)
    commands = server.handle(Failed(lost.id, "gone"), Joined(2))
    for _ in range(3):
        tasks |= {task.device: task for task in sends(commands)}
        if 2 in tasks:
            break
        answers = [answer(task, 1.0) for task in tasks.values()]
        tasks.clear()
        commands = server.handle(*answers)
    assert tasks[2].number == 1
    server.handle(answer(tasks[2], 1.0))
    assert server.accepted >= 1

"""A fleet pass in commits, and what depends on it: hand-worked models of a server."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, Left, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.mid_task_push import MidTaskPush
from latecomer.strategies.latecomer.strategy import latecomer


def begun(devices, share=0.5, age_discount=0.0):
    merge = CachedAggregation(share, 1.0, 0.0, age_discount=age_discount)
    server = Server(torch.zeros(1), Strategy(merge=merge), TrainSpec())
    return server, *sends(server.handle(*map(Joined, range(devices))))


def answer(task, delta):
    return Arrived(task.device, Update(task.id, torch.tensor([delta]), 1))


def moves(server, task, commits):
    """How far each commit moves the model while one device sends zeros."""
    found, before = [], server.store.head_params().item()
    for _ in range(commits):
        (task,) = sends(server.handle(answer(task, 0.0)))
        found.append(server.store.head_params().item() - before)
        before += found[-1]
    return found


def test_the_update_of_an_absent_device_is_dropped_after_three_fleet_passes():
    """Two devices and one arrival per commit: a pass is 2 commits, three are 6."""
    server, one, two = begun(2)
    server.handle(answer(two, 4.0), Left(1))
    assert server.store.head_params().item() == 2.0
    # Each commit moves it by half of the mean of 4 and 0, while the 4 is cached.
    assert moves(server, one, 9) == [1.0] * 6 + [0.0] * 3


def test_a_fleet_pass_counts_the_commits_of_every_lineage():
    server, one, two = begun(2)
    server.handle(answer(two, 4.0), Left(1))
    server.store.fork("main", "other")
    assert moves(server, one, 15) == [1.0] * 12 + [0.0] * 3


def test_a_fleet_pass_is_shorter_where_more_devices_arrive_per_commit():
    """Four devices and two arrivals per commit: a pass is 2 commits as well."""
    server, one, two, three, four = begun(4)
    server.handle(answer(three, 0.0), answer(four, 8.0), Left(3))
    assert server.store.head_params().item() == 2.0  # half a pass: 0.5 * (0 + 8) / 2
    found = []
    for _ in range(8):
        before = server.store.head_params().item()
        one, two = sends(server.handle(answer(one, 0.0), answer(two, 0.0)))
        found.append(server.store.head_params().item() - before)
    assert found == [1.0] * 6 + [0.0] * 2  # 0.5 * (0 + 0 + 0 + 8) / 4


def test_the_update_of_a_device_that_is_idle_or_works_is_never_dropped():
    server, one, two = begun(2)
    server.handle(answer(two, 4.0))
    assert moves(server, one, 9) == [1.0] * 9


@pytest.mark.parametrize("exponent", [0.5, 2.0])
def test_updates_older_than_a_fleet_pass_are_discounted(exponent):
    server, one, two = begun(2, age_discount=exponent)
    server.handle(answer(two, 4.0))
    ages = [0.5, 1.0, 1.5, 2.0, 2.5]  # in fleet passes of 2 commits
    weights = [1.0 if age <= 1 else age**-exponent for age in ages]
    expected = [0.5 * 4.0 * weight / (weight + 1.0) for weight in weights]
    assert moves(server, one, 5) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "commits"), [(0.1, 10), (0.3, 3), (0.6, 2), (1.0, 2), (0.001, 1000), (0.0, 100)]
)
def test_stragglers_are_pushed_models_a_fleet_pass_old(share, commits):
    (push,) = [o for o in latecomer(share).observers if isinstance(o, MidTaskPush)]
    assert push.behind == commits

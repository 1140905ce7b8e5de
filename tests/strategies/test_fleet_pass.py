"""A fleet pass in commits, and what depends on it: hand-worked models of a server."""

import pytest
import torch
from latecomer.strategies.latecomer.mid_task_push import MidTaskPush

from commands import logged, sends
from latecomer.core.messages import Arrived, Contribution, Joined, Left, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Observer, Split, Strategy
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
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
    (one,) = sends(server.handle(answer(one, 0.0)))
    (one,) = sends(server.handle(answer(one, 0.0)))
    server.handle(answer(two, 4.0), Left(1))
    assert server.store.head_params().item() == 1.0  # 0.5 * (0 + 4) / 2
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


class SplitTwo(Observer):
    """Assigns devices 2 and 3 to a lineage of their own."""

    def act(self, view):
        if "other" not in view.store:
            yield Split("main", "other", (2, 3))


def test_the_devices_of_a_lineage_are_its_members():
    strategy = Strategy(merge=CachedAggregation(0.5, 1.0, 0.0), observers=(SplitTwo(),))
    server = Server(torch.zeros(1), strategy, TrainSpec())
    one, *_ = sends(server.handle(*map(Joined, range(4))))
    server.handle(answer(one, 4.0))
    assert server.store.commits == 1  # one of two members is half of them
    assert server.store.head_params().item() == 2.0


def test_surrogates_renew_updates_that_are_older_than_a_fleet_pass():
    fresh = []

    def surrogates(lineage, devices, view):
        fresh.append(list(devices))
        if len(fresh) < 4:
            return []
        task, delta = view.open_tasks[view.working[1]], torch.tensor([8.0])
        return [Contribution(task, Update(task.id, delta, 1), task.params, delta, lineage, 0)]

    strategy = Strategy(merge=CachedAggregation(0.5, 1.0, 0.0, surrogates=surrogates))
    server = Server(torch.zeros(1), strategy, TrainSpec())
    first, second = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(second, 4.0))
    assert moves(server, first, 2) == [1.0, 1.0]
    (first,) = [task for task in server.open_tasks.values() if task.device == 0]
    commands = server.handle(answer(first, 0.0))
    assert fresh == [[1], [1, 0], [1, 0], [0]]
    assert [line["surrogates"] for line in logged(commands, "commit")] == [1]
    assert server.store.head_params().item() == 4.0 + 0.5 * (8 + 0) / 2


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

"""Tiers by hand, each way a round can end, and the limits in which it is FedAvg."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Failed, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet, with_lateness
from latecomer.fleet.late import Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.papers.asyn_tiers import asyn_tiers
from latecomer.strategies.recipe import build_strategy
from toy import ToyRun, toy_run, toy_server

SLOW = 3


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def answers(tasks, *delta):
    return [answer(task, *delta) for task in tasks]


def head(server):
    return server.store.head_params().tolist()


def three_fast_one_slow(submodel=None):
    """Device 3 misses the first round; the others hold version 1, which is 1."""
    size = 1 if submodel is None else 2
    server = Server(torch.zeros(size), asyn_tiers(), TrainSpec())
    *fast, slow = sends(server.handle(*map(Joined, range(3)), Joined(SLOW, submodel)))
    fast = sends(server.handle(*answers(fast, *[1.0] * size)))
    assert head(server) == [1.0] * size
    assert [task.device for task in fast] == [0, 1, 2]
    return server, fast, slow


def test_a_tier_averages_by_examples():
    server = Server(torch.zeros(1), asyn_tiers(), TrainSpec())
    a, b = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(a, 1.0, examples=1), answer(b, 4.0, examples=3))
    assert head(server) == [3.25]


def test_the_global_model_is_the_mean_of_tier_models_by_devices():
    server, fast, slow = three_fast_one_slow()
    fast = sends(server.handle(*answers(fast, 1.0)))
    assert head(server) == [2.0]  # the slow tier has no model yet
    (slow,) = sends(server.handle(answer(slow, 8.0)))
    assert head(server) == [(3 * 2.0 + 8.0) / 4]  # 8 from version 0, which was 0
    assert (slow.device, slow.version) == (SLOW, 3)
    # The fast tier was sent version 2, which was 2.
    fast = sends(server.handle(*answers(fast, 1.0)))
    assert head(server) == [(3 * 3.0 + 8.0) / 4]
    # And now version 4, which is 4.25.
    server.handle(*answers(fast, 1.0), answer(slow, 0.5))
    assert head(server) == [(3 * 5.25 + 4.0) / 4]
    assert server.store.commits == 5  # two rounds that end in one moment are one commit


def test_uploads_in_flight_keep_a_round_open_for_each_version():
    server = Server(torch.zeros(1), asyn_tiers(), TrainSpec())
    *fast, slow = sends(server.handle(*map(Joined, range(4))))
    late = [slow]
    for version in (1, 2, 3):
        # The slow one is free again while its uploads are under way.
        *fast, slow = sends(server.handle(*answers(fast, 1.0), Joined(SLOW)))
        assert {task.version for task in (*fast, slow)} == {version}
        late.append(slow)
    assert sends(server.handle(answer(late[0], 8.0))) == []  # everybody is at work
    assert head(server) == [(3 * 3.0 + 8.0) / 4]
    server.handle(answer(late[2], 8.0))
    assert head(server) == [(3 * 3.0 + 10.0) / 4]  # from version 2
    *fast, slow = sends(server.handle(*answers(fast, 0.0), Joined(SLOW)))
    assert {task.version for task in (*fast, slow)} == {6}


def test_the_slowest_tier_waits_for_everybody_but_the_lost():
    server = Server(torch.zeros(1), asyn_tiers(tiers=2, quorum=0.6), TrainSpec())
    tasks = sends(server.handle(*map(Joined, range(6))))
    server.handle(*answers(tasks[:3], 1.0))
    server.handle(answer(tasks[3], 1.0))
    server.handle(answer(tasks[4], 5.0))
    assert server.store.commits == 1
    (again,) = sends(server.handle(Failed(tasks[5].id, "gone")))
    assert head(server) == [pytest.approx((4 * 1.0 + 5.0) / 5)]
    assert again.device == 4
    assert [t.device for t in sends(server.handle(Joined(5)))] == []  # until its tier begins
    assert [t.device for t in sends(server.handle(answer(again, 0.0)))] == [5, 4]


def test_a_tier_that_is_lost_has_no_say():
    server, fast, slow = three_fast_one_slow()
    (slow,) = sends(server.handle(answer(slow, 9.0)))
    assert head(server) == [(3 * 1.0 + 9.0) / 4]
    server.handle(Failed(slow.id, "gone"))
    server.handle(*answers(fast, 1.0))
    assert head(server) == [2.0]


def test_a_round_that_is_lost_as_a_whole_starts_over():
    server = Server(torch.zeros(1), asyn_tiers(), TrainSpec())
    (task,) = sends(server.handle(Joined(0)))
    server.handle(Failed(task.id, "gone"))
    (task,) = sends(server.handle(Joined(0)))
    assert task.version == 0
    server.handle(answer(task, 1.0))
    assert head(server) == [1.0]


def test_a_tier_keeps_an_equal_part_of_the_devices():
    server = Server(torch.zeros(1), asyn_tiers(tiers=2, quorum=0.5), TrainSpec())
    tasks = sends(server.handle(*map(Joined, range(4))))
    one, two = sends(server.handle(*answers(tasks[:2], 1.0)))
    # Half of the two would be a quorum, but then one of four were left in the tier.
    assert sends(server.handle(answer(one, 1.0))) == []
    assert len(sends(server.handle(answer(two, 1.0)))) == 2


def test_a_round_of_some_moves_the_model_of_its_tier_by_their_part():
    server = Server(torch.zeros(1), asyn_tiers(tiers=2, quorum=0.6), TrainSpec())
    *fast, third, fourth = sends(server.handle(*map(Joined, range(5))))
    fast = sends(server.handle(*answers([*fast, third], 0.0)))
    # Device 4 is in the slower tier; 3 follows with a younger version.
    assert [task.device for task in fast] == [0, 1, 2, 3]
    *fast, third = fast
    fast = sends(server.handle(*answers(fast, 0.0)))
    server.handle(answer(fourth, 10.0))
    assert head(server) == [pytest.approx(2 * 10.0 / 5)]
    server.handle(answer(third, 0.0))
    # Both are in now: half of the way from 10 to 0.
    assert head(server) == [pytest.approx(2 * 5.0 / 5)]


def test_a_newcomer_waits_for_the_next_round():
    server, fast, _ = three_fast_one_slow()
    assert sends(server.handle(Joined(7))) == []
    assert [t.device for t in sends(server.handle(*answers(fast, 1.0)))] == [7, 0, 1, 2]


def test_a_coordinate_belongs_to_the_tiers_that_train_it():
    server, fast, slow = three_fast_one_slow(Submodel("first", torch.tensor([0])))
    fast = sends(server.handle(*answers(fast, 1.0, 0.1)))
    before = server.store.head_params()
    server.handle(answer(slow, 8.0))
    assert head(server)[0] == (3 * 2.0 + 8.0) / 4
    assert torch.equal(server.store.head_params()[1], before[1])
    server.handle(*answers(fast, 0.0, 1.0))
    assert head(server) == pytest.approx([3.5, 2.1])


@pytest.mark.parametrize("options", [{"quorum": 1.0}, {"tiers": 1}])
def test_one_tier_is_fedavg(options):
    ours, plain = toy_run("asyn-tiers", 60, **options), toy_run("fedavg", 60)
    assert ours.heads()["main"] == pytest.approx(plain.heads()["main"], rel=1e-6)
    assert [f["version"] for _, f in ours.lines("dispatch")] == [
        f["version"] for _, f in plain.lines("dispatch")
    ]


def test_if_all_are_on_time_it_is_semi_async():
    fleet = Fleet((DeviceProfile(seconds_per_task=1.0),) * 5)
    ours, plain = toy_run("asyn-tiers", 60, fleet), toy_run("semi-async", 60, fleet, quorum=1.0)
    assert ours.heads()["main"] == pytest.approx(plain.heads()["main"], rel=1e-6)
    assert ours.server.store.commits == plain.server.store.commits == 12


@pytest.mark.parametrize("after", [5, 23, 42])
def test_a_checkpoint_with_uploads_in_flight(after):
    fleet = Fleet((DeviceProfile(seconds_per_task=1.0),) * 6, seed=3)
    fleet = with_lateness(fleet, [1, 4], Lateness("in-flight", 3.0, gamma=True))
    whole = ToyRun(toy_server("asyn-tiers"), fleet)
    first = ToyRun(toy_server("asyn-tiers"), fleet)
    for run in (whole, first):
        run.until(after)
    whole.until(80)
    second = first.carried_over(ToyRun(toy_server("asyn-tiers"), fleet))
    second.until(80)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()


def test_its_commits_are_no_epochs_of_the_fleet():
    assert not asyn_tiers().has_epochs


@pytest.mark.parametrize(("option", "value"), [("tiers", 0), ("tiers", 2.5), ("quorum", 0.0)])
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("asyn-tiers", {option: value})

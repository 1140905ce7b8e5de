"""Hand-worked synchronisation points of FedSEA, its limit, and each way a round can end."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Failed, Joined, Later, TimerExpired, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet, with_lateness
from latecomer.fleet.late import Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.papers.fedsea import fedsea, fitting_epochs, sync_point
from latecomer.strategies.recipe import build_strategy
from toy import ToyRun, toy_fleet, toy_run, toy_server


def serve(devices=3, **options):
    server = Server(torch.zeros(1), fedsea(**options), TrainSpec(local_epochs=2))
    return server, server.handle(*map(Joined, range(devices)))


def timers(commands):
    return [(pytest.approx(c.seconds), c.event) for c in commands if isinstance(c, Later)]


def answer(task, delta, seconds, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor([delta]), examples), seconds)


def head(server):
    return server.store.head_params().item()


@pytest.mark.parametrize(
    ("arrivals", "least", "point"),
    [
        ([4.0, 5.0, 6.0, 60.0], 1, (3, 6.0)),  # 1/4, 2/5, 3/6 and 4/60 updates a second
        ([4.0, 5.0, 6.0, 60.0], 4, (4, 60.0)),
        ([10.0, 1.0, 2.0], 1, (2, 2.0)),  # 1/1 and 2/2 are as good: the later
        ([1.0, 10.0], 1, (1, 1.0)),
        ([0.0, 5.0], 1, (1, 0.0)),
    ],
)
def test_the_most_updates_a_second(arrivals, least, point):
    assert sync_point(arrivals, least) == point


@pytest.mark.parametrize(
    ("pace", "seconds", "epochs"), [(3.0, 10.0, 3), (20.0, 10.0, 1), (1.0, 10.0, 5), (0.0, 0.0, 5)]
)
def test_epochs_that_fit(pace, seconds, epochs):
    assert fitting_epochs(pace, seconds, max_epochs=5) == epochs


def test_three_rounds_by_hand():
    server, commands = serve(quorum=0.6, slack=0.1, balance=1.0)
    a, b, c = sends(commands)
    assert timers(commands) == []  # nothing is known yet: two of three end the round
    server.handle(answer(a, 1.0, seconds=2.0))
    commands = server.handle(answer(b, 3.0, seconds=3.0))
    assert head(server) == 2.0
    # Round 2, at 3 s. 0 and 1 are predicted after 2 and 3 s, 2 is unknown: two in 3 s.
    a, b = sends(commands)
    assert [task.spec.local_epochs for task in (a, b)] == [2, 2]
    assert timers(commands) == [(3.3, TimerExpired("sync", 1))]
    server.handle(answer(c, 4.0, seconds=4.0))  # sent at 0, so this is at 4 s
    commands = server.handle(answer(a, 1.0, seconds=2.0))  # at 5 s
    # 2 counts in one round of two, 0 in both: weights 2 and 1.
    assert head(server) == 2.0 + (2 * 4.0 + 1.0) / 3
    # Round 3. 60% of the devices do both epochs in 3 s; 2 needs 2 s for one and does no more.
    slow, fast = sorted(sends(commands), key=lambda task: -task.device)
    assert (slow.device, slow.spec.local_epochs) == (2, 1)
    assert (fast.device, fast.spec.local_epochs) == (0, 2)
    # 1 is out since 3 s and due in 1 s, 0 and 2 in 2 s: all three in 2 s.
    assert timers(commands) == [(2.2, TimerExpired("sync", 2))]
    server.handle(answer(b, 0.0, seconds=3.0), answer(fast, 0.0, seconds=2.0))
    assert server.store.commits == 2
    server.handle(answer(slow, 0.0, seconds=2.0))
    assert server.store.commits == 3


def known_pair(**options):
    """Two devices with tasks of 1 and 1 s in round 2."""
    server, commands = serve(devices=2, quorum=1.0, slack=0.5, **options)
    a, b = sends(commands)
    commands = server.handle(answer(a, 0.0, seconds=1.0), answer(b, 0.0, seconds=1.0))
    assert timers(commands) == [(1.5, TimerExpired("sync", 1))]
    return server, *sends(commands)


def test_a_round_ends_when_its_time_is_over():
    server, a, b = known_pair()
    server.handle(answer(a, 1.0, seconds=1.0))
    assert server.store.commits == 1
    commands = server.handle(TimerExpired("sync", 1))
    assert server.store.commits == 2
    # Now at 2.5 s. 1 is overdue by half a second, of 1.5 in all: expected in as long again.
    assert timers(commands) == [(1.5 * 1.5, TimerExpired("sync", 2))]
    server.handle(answer(b, 3.0, seconds=2.0))
    assert server.store.commits == 2
    (a,) = sends(commands)
    server.handle(answer(a, 0.0, seconds=1.0))
    assert server.store.commits == 3


def test_an_old_timer_does_not_end_a_new_round():
    server, a, b = known_pair()
    a, b = sends(server.handle(answer(a, 1.0, seconds=1.0), answer(b, 1.0, seconds=1.0)))
    server.handle(answer(a, 1.0, seconds=1.0))
    server.handle(TimerExpired("sync", 1))
    assert server.store.commits == 2


def test_a_time_that_is_over_with_nobody_back_waits_for_the_first():
    server, _, b = known_pair()
    server.handle(TimerExpired("sync", 1))
    assert server.store.commits == 1
    server.handle(answer(b, 4.0, seconds=9.0))
    assert head(server) == 4.0


def test_lost_devices_no_longer_count():
    server, a, b = known_pair()
    server.handle(answer(a, 1.0, seconds=1.0))
    server.handle(Failed(b.id, "gone"))
    assert server.store.commits == 2


def test_it_starts_over_when_all_are_lost():
    server, commands = serve(devices=1)
    (task,) = sends(commands)
    server.handle(Failed(task.id, "gone"))
    (task,) = sends(server.handle(Joined(0)))
    server.handle(answer(task, 1.0, seconds=1.0))
    assert head(server) == 1.0


def test_a_newcomer_waits_and_is_not_held_to_be_rare():
    server, a, b = known_pair(balance=1.0)
    assert sends(server.handle(Joined(7))) == []
    tasks = sends(server.handle(answer(a, 0.0, seconds=1.0), answer(b, 0.0, seconds=1.0)))
    assert {task.device for task in tasks} == {0, 1, 7}
    server.handle(*(answer(task, float(task.device == 7), seconds=1.0) for task in tasks))
    assert head(server) == pytest.approx(1 / 3)


def test_a_pace_follows_the_device():
    server, a, b = known_pair()
    server.handle(answer(a, 0.0, seconds=3.0), answer(b, 0.0, seconds=1.0))
    # 0.5 s for an epoch before, 1.5 s now.
    assert server.strategy.merge._pace == {0: 1.0, 1: 0.5}


def test_rarity_is_made_up_for_in_part():
    weights = []
    for balance in (0.0, 0.5, 1.0):
        server, commands = serve(devices=2, quorum=0.5, balance=balance)
        fast, slow = sends(commands)
        for _ in range(3):
            (fast,) = sends(server.handle(answer(fast, 0.0, seconds=1.0)))
        commands = server.handle(answer(slow, 0.0, seconds=3.5, examples=10))
        (line,) = [c.fields for c in commands if getattr(c, "kind", "") == "arrival"]
        weights.append(line["weight"])
    assert weights == [10.0, 20.0, 40.0]  # once in four rounds


def test_one_point_after_all_is_fedavg():
    ours, plain = toy_run("fedsea", 60, quorum=1.0), toy_run("fedavg", 60)
    assert ours.heads() == plain.heads()
    assert ours.server.store.commits == plain.server.store.commits == 12


def test_it_does_not_wait_for_the_slowest():
    fleet = Fleet(tuple(DeviceProfile(seconds_per_task=t) for t in (1.0, 1.1, 1.2, 1.3, 50.0)))
    ours, plain = (ToyRun(toy_server(name), fleet) for name in ("fedsea", "fedavg"))
    for run in (ours, plain):
        run.until(virtual_seconds=200.0)
    assert ours.server.store.commits > 30 * plain.server.store.commits
    assert 4 in {f["device"] for _, f in ours.lines("arrival")}


@pytest.mark.parametrize("after", [5, 23, 42])
def test_a_checkpoint_with_uploads_in_flight(after):
    fleet = toy_fleet(6, jitter=0.3)
    fleet = with_lateness(fleet, [1, 4], Lateness("in-flight", 3.0, gamma=True))
    whole, first, second = (ToyRun(toy_server("fedsea"), fleet) for _ in range(3))
    for run in (whole, first):
        run.until(after)
    whole.until(80)
    first.carried_over(second)
    second.until(80)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()


@pytest.mark.parametrize(("option", "value"), [("quorum", 0.0), ("slack", -0.1), ("balance", 2.0)])
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("fedsea", {option: value})

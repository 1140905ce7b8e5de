"""Hand-worked rounds of SAFA, its limit, and each way a round can end."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    Arrived,
    Failed,
    Joined,
    Later,
    TimerExpired,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet, with_lateness
from latecomer.fleet.late import Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.papers.safa import safa
from latecomer.strategies.recipe import build_strategy
from toy import ToyRun, toy_fleet, toy_run, toy_server


def serve(devices=4, size=1, **options):
    server = Server(torch.zeros(size), safa(**options), TrainSpec())
    return server, server.handle(*map(Joined, range(devices)))


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def dropped(commands):
    return [line["reason"] for line in logged(commands, "drop")]


def head(server):
    return server.store.head_params().tolist()


def test_three_rounds_by_hand():
    server, commands = serve(quorum=0.5)
    a, b, c, _ = sends(commands)
    # Round 1: the first two are picked. Nothing is known of the others yet.
    server.handle(answer(a, 4.0))
    a, b = sends(server.handle(answer(b, 8.0)))
    assert head(server) == [6.0]
    # Round 2: 2 was not picked and comes before 0 and 1; one place is left, and 0 was first.
    server.handle(answer(a, 2.0))  # its model is 8
    server.handle(answer(c, 2.0))  # trained on 0: its model is 2
    assert server.store.commits == 1
    tasks = sends(server.handle(answer(b, -1.0)))  # 5, undrafted: 8 still counts for it
    assert head(server) == [(8.0 + 2.0 + 8.0) / 3]  # Eq. 7
    # Round 3: 0 and 2 were picked, so 1 goes first, and 0 is the first of the others.
    a, b, c = sorted(tasks, key=lambda task: task.device)
    server.handle(answer(a, 0.0), answer(b, 1.0), answer(c, 0.0))
    assert head(server) == [pytest.approx((6.0 + 7.0 + 2.0) / 3)]


def test_what_was_not_drafted_counts_in_the_next_round():
    server, commands = serve(devices=3, quorum=0.3)
    a, b, c = sends(commands)
    # All at once: 0 is first, 1 and 2 bypass the round.
    a, b, c = sends(server.handle(answer(a, 3.0), answer(b, 9.0), answer(c, 6.0)))
    assert head(server) == [3.0]
    server.handle(answer(b, 1.0))  # 1 is picked, from 3 to 4; 0 has 3, and 2 the 6 of before
    assert head(server) == [pytest.approx((4.0 + 3.0 + 6.0) / 3)]


def test_examples_are_weights():
    server, commands = serve(devices=2, quorum=1.0)
    a, b = sends(commands)
    server.handle(answer(a, 4.0, examples=3), answer(b, 8.0, examples=1))
    assert head(server) == [5.0]


def test_a_device_too_far_behind_is_deprecated():
    """Four devices, one of them three rounds late, with tau = 1."""
    server, commands = serve(quorum=0.5, lag=1)
    *fast, slow = sends(commands)
    fast = sends(server.handle(*(answer(task, 1.0) for task in fast)))
    for _ in range(2):
        assert {task.device for task in fast} == {0, 1, 2}
        fast = sends(server.handle(*(answer(task, 0.0) for task in fast)))
    before = head(server)
    commands = server.handle(answer(slow, 3.0))
    assert dropped(commands) == ["its device is deprecated: more than 1 versions behind"]
    # It gets the latest model with the next round.
    assert sends(commands) == []
    fast = sends(server.handle(*(answer(task, 0.0) for task in fast)))
    assert {task.device for task in fast} == {0, 1, 2, 3}
    assert head(server) == before


def test_a_tolerable_device_goes_on_and_counts():
    server, commands = serve(quorum=0.5, lag=2)
    *fast, slow = sends(commands)
    for _ in range(2):
        fast = sends(server.handle(*(answer(task, 0.0) for task in fast)))
        assert {task.device for task in fast} == {0, 1, 2}
    server.handle(answer(slow, 8.0), *(answer(task, 0.0) for task in fast))
    assert server.store.commits == 3
    assert head(server) == [2.0]


def test_the_entry_of_a_deprecated_device_becomes_the_global_model():
    server, commands = serve(devices=2, quorum=0.5, lag=0)
    a, b = sends(commands)
    a, b = sends(server.handle(answer(a, 4.0), answer(b, 8.0)))  # 0 is picked
    assert head(server) == [4.0]
    # 1 goes first now. 0 stays away, and does not have the model of round 3 when that ends.
    (b,) = sends(server.handle(answer(b, 4.0)))
    assert head(server) == [(4.0 + 8.0) / 2]
    server.handle(Failed(a.id, "gone"))
    server.handle(answer(b, 6.0))
    assert head(server) == [(6.0 + 12.0) / 2]  # Eq. 6: 0 stands for the 6 of round 2, not its 4


def test_a_round_waits_for_those_it_has_not_picked_until_the_timeout():
    server, commands = serve(quorum=0.5, timeout=60.0)
    (timer,) = [c for c in commands if isinstance(c, Later)]
    assert (timer.seconds, timer.event) == (60.0, TimerExpired("epoch", 0))
    a, b, *_ = sends(commands)
    server.handle(answer(a, 1.0))
    a, b = sends(server.handle(answer(b, 1.0)))
    server.handle(answer(a, 0.0), answer(b, 0.0))
    assert server.store.commits == 1  # 2 and 3 may still come
    server.handle(TimerExpired("epoch", 0))
    assert server.store.commits == 1  # the timer of a round that is over
    assert len(sends(server.handle(TimerExpired("epoch", 1)))) == 2
    assert server.store.commits == 2


def test_a_timeout_without_updates_waits_for_the_first():
    server, commands = serve(devices=2, quorum=1.0, timeout=60.0)
    _, b = sends(commands)
    server.handle(TimerExpired("epoch", 0))
    assert server.store.commits == 0
    server.handle(answer(b, 2.0))
    assert head(server) == [2.0]


def test_without_a_timeout_a_round_ends_when_its_own_are_back():
    server, commands = serve(quorum=0.5)
    a, b, *_ = sends(commands)
    a, b = sends(server.handle(answer(a, 1.0), answer(b, 1.0)))
    server.handle(answer(a, 0.0))
    assert server.store.commits == 1
    server.handle(Failed(b.id, "gone"))
    assert server.store.commits == 2


def test_an_older_model_does_not_replace_a_later_one():
    server, commands = serve(devices=2, quorum=0.5)
    late, b = sends(commands)
    # 0 is free again before its upload is through, and its second one is faster.
    again, b = sorted(sends(server.handle(Joined(0), answer(b, 2.0))), key=lambda t: t.device)
    server.handle(answer(again, 4.0))
    assert head(server) == [(6.0 + 2.0) / 2]
    assert dropped(server.handle(answer(late, 10.0))) == ["its device has sent a later model"]


def test_it_starts_over_when_all_are_lost():
    server, commands = serve(devices=1)
    (task,) = sends(commands)
    server.handle(Failed(task.id, "gone"))
    (task,) = sends(server.handle(Joined(0)))
    server.handle(answer(task, 1.0))
    assert head(server) == [1.0]


def test_a_newcomer_waits_for_the_next_round():
    server, commands = serve(devices=2, quorum=1.0)
    a, b = sends(commands)
    assert sends(server.handle(Joined(7))) == []
    assert {t.device for t in sends(server.handle(answer(a, 1.0), answer(b, 1.0)))} == {0, 1, 7}


def test_sub_models_count_where_they_train():
    server = Server(torch.zeros(2), safa(quorum=1.0), TrainSpec())
    half = Submodel("half", torch.tensor([1]))
    a, b = sends(server.handle(Joined(0), Joined(1, half)))
    a, b = sends(server.handle(answer(a, 2.0, 2.0), answer(b, 4.0)))
    assert head(server) == [2.0, 3.0]
    server.handle(answer(a, 0.0, 0.0), answer(b, 0.0))
    assert head(server) == [2.0, 3.0]


def test_if_all_count_it_is_fedavg():
    assert toy_run("safa", 60, quorum=1.0).heads() == toy_run("fedavg", 60).heads()


def test_every_device_is_cached_and_contributes():
    run = toy_run("safa", 200, toy_fleet(10), quorum=0.3)
    assert {f["device"] for _, f in run.lines("arrival")} == set(range(10))
    assert run.server.strategy.merge.state()["cache"].keys() == set(range(10))


@pytest.mark.parametrize("after", [5, 23, 42])
@pytest.mark.parametrize("options", [{"lag": 1}, {"timeout": 2.5}])
def test_a_checkpoint_with_uploads_in_flight(after, options):
    fleet = Fleet((DeviceProfile(seconds_per_task=1.0),) * 6, seed=3)
    fleet = with_lateness(fleet, [1, 4], Lateness("in-flight", 3.0, gamma=True))
    whole, first, second = (ToyRun(toy_server("safa", options), fleet) for _ in range(3))
    for run in (whole, first):
        run.until(after)
    whole.until(80)
    first.carried_over(second)
    second.until(80)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()


@pytest.mark.parametrize(("option", "value"), [("quorum", 0.0), ("lag", -1), ("timeout", -1.0)])
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("safa", {option: value})

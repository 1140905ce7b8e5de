"""Hand-worked merges, driven through the server."""

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
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.semi_async import semi_async


def serve(strategy, start=(0.0, 0.0)):
    return Server(torch.tensor(start), strategy, TrainSpec())


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def head(server):
    return server.store.head_params().tolist()


def test_fedavg_averages_by_examples_and_waits_for_all():
    server = serve(fedavg())
    a, b = sends(server.handle(Joined(0), Joined(1)))
    assert sends(server.handle(answer(a, 1.0, 0.0, examples=1))) == []
    assert server.store.commits == 0
    second = sends(server.handle(answer(b, 4.0, 4.0, examples=3)))
    assert head(server) == [3.25, 3.0]
    assert [t.version for t in second] == [1, 1]


def test_fedavg_goes_on_without_a_lost_device():
    server = serve(fedavg())
    a, b = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(a, 1.0, 1.0))
    (again,) = sends(server.handle(Failed(b.id, "gone")))
    assert head(server) == [1.0, 1.0]
    assert again.device == 0


def test_fedavg_starts_over_when_all_are_lost():
    server = serve(fedavg())
    (task,) = sends(server.handle(Joined(0)))
    server.handle(Failed(task.id, "gone"))
    assert len(sends(server.handle(Joined(0)))) == 1


def test_fedavg_timeout_closes_the_round_and_the_straggler_is_dropped():
    server = serve(fedavg(timeout=60))
    commands = server.handle(Joined(0), Joined(1))
    a, b = sends(commands)
    (timer,) = [c for c in commands if isinstance(c, Later)]
    assert timer.seconds == 60
    server.handle(answer(a, 2.0, 2.0))
    assert server.store.commits == 0
    server.handle(timer.event)
    assert head(server) == [2.0, 2.0]
    commands = server.handle(answer(b, 9.0, 9.0))
    assert logged(commands, "drop")
    assert head(server) == [2.0, 2.0]


def test_an_old_timer_does_not_close_a_new_round():
    server = serve(fedavg(timeout=60))
    a, b = sends(server.handle(Joined(0), Joined(1)))
    a, b = sends(server.handle(answer(a, 1.0, 1.0), answer(b, 1.0, 1.0)))
    server.handle(answer(a, 1.0, 1.0))
    server.handle(TimerExpired("epoch", 0))
    assert server.store.commits == 1


def test_fedavg_samples_a_fraction():
    server = serve(fedavg(fraction=0.3))
    tasks = sends(server.handle(*map(Joined, range(10))))
    assert len(tasks) == 3


def test_fedavg_waits_for_enough_devices():
    server = serve(fedavg(min_devices=3))
    assert sends(server.handle(Joined(0), Joined(1))) == []
    assert len(sends(server.handle(Joined(2)))) == 3


def test_semi_async_closes_at_the_quorum_and_adds_the_late_one_later():
    server = serve(semi_async(quorum=0.7))
    tasks = sends(server.handle(*map(Joined, range(10))))
    for task in tasks[:6]:
        assert sends(server.handle(answer(task, 1.0, 0.0))) == []
    fresh = sends(server.handle(answer(tasks[6], 1.0, 0.0)))
    assert head(server) == [1.0, 0.0]
    assert len(fresh) == 7
    # Three stragglers answer the old model while the seven answer the new one.
    server.handle(*(answer(t, 0.0, 10.0) for t in tasks[7:]))
    assert server.store.commits == 1
    server.handle(*(answer(t, 0.0, 0.0) for t in fresh))
    assert head(server) == [1.0, 3.0]


def test_everybody_who_arrives_at_the_same_moment_is_in_the_epoch():
    server = serve(semi_async(quorum=0.7))
    tasks = sends(server.handle(*map(Joined, range(10))))
    again = sends(server.handle(*(answer(t, 1.0, 1.0) for t in tasks)))
    assert server.store.commits == 1
    assert len(again) == 10


def test_fedbuff_moves_by_the_mean_of_k_weighted_deltas_against_their_own_bases():
    server = serve(fedbuff(size=2, server_lr=0.5))
    slow, fast = sends(server.handle(Joined(0), Joined(1)))
    (fast,) = sends(server.handle(answer(fast, 1.0, 0.0)))
    (fast,) = sends(server.handle(answer(fast, 3.0, 0.0)))
    assert head(server) == [1.0, 0.0]  # 0.5 * (1 + 3) / 2
    server.handle(answer(slow, 4.0, 0.0))  # staleness 1: weight 1 / sqrt(2)
    server.handle(answer(fast, 2.0, 0.0))
    assert head(server)[0] == torch.tensor(1 + 0.5 * (4 / 2**0.5 + 2) / 2).item()


def test_fedbuff_of_one_with_constant_weight_adds_the_delta():
    server = serve(fedbuff(size=1, decay="constant"))
    slow, fast = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(fast, 1.0, 2.0))
    server.handle(answer(slow, 0.5, 0.5))
    assert head(server) == [1.5, 2.5]


def test_fedasync_mixes_models_not_deltas():
    server = serve(fedasync(alpha=0.5, decay="constant"))
    slow, fast = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(fast, 4.0, 4.0))
    assert head(server) == [2.0, 2.0]
    server.handle(answer(slow, 4.0, 0.0))  # its model is (4, 0), trained from (0, 0)
    assert head(server) == [3.0, 1.0]


def test_fedasync_concurrency_limits_the_working():
    server = serve(fedasync(concurrency=3))
    tasks = sends(server.handle(*map(Joined, range(10))))
    assert len(tasks) == 3
    assert len(sends(server.handle(answer(tasks[0], 0.0, 0.0)))) == 1


def test_pruned_members_are_averaged_per_coordinate():
    server = serve(fedavg(), start=(0.0, 0.0, 0.0))
    first_two = Submodel("narrow", torch.tensor([0, 1]))
    wide, narrow = sends(server.handle(Joined(0), Joined(1, first_two)))
    server.handle(answer(wide, 1.0, 1.0, 1.0), answer(narrow, 3.0, 3.0))
    assert head(server) == [2.0, 2.0, 1.0]


def test_coordinates_nobody_trained_stay_bit_unchanged():
    value = 0.1 + 1e-9
    server = serve(fedbuff(size=1), start=(value, value, value))
    (task,) = sends(server.handle(Joined(0, Submodel("first", torch.tensor([0])))))
    before = server.store.head_params().clone()
    server.handle(answer(task, 1.0))
    after = server.store.head_params()
    assert torch.equal(before[1:], after[1:])
    assert after[0] != before[0]


def test_an_epoch_of_three_closes_with_the_second_update_at_a_quorum_of_one_half():
    server = serve(semi_async(quorum=0.5))
    one, two, _ = sends(server.handle(*map(Joined, range(3))))
    server.handle(answer(one, 1.0, 1.0))
    assert server.store.commits == 0
    server.handle(answer(two, 3.0, 1.0))
    assert head(server) == [2.0, 1.0]


def test_fedbuff_divides_by_the_number_of_updates_that_cover_a_coordinate():
    first = Submodel("first", torch.tensor([0]))
    server = serve(fedbuff(size=2, server_lr=0.5))
    one, two = sends(server.handle(Joined(0), Joined(1, first)))
    server.handle(answer(one, 2.0, 4.0), answer(two, 6.0))
    assert head(server) == [0.5 * (2 + 6) / 2, 0.5 * 4 / 1]

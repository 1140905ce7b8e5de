"""Hand-worked calibration, and which updates are cached."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, Left, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.papers.ca2fl import CalibratedBuffer, ca2fl
from latecomer.strategies.parts.dispatching import OneLineageEach
from latecomer.strategies.recipe import build_strategy

FIRST = Submodel("first", torch.tensor([0]))


def answer(task, *delta):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), 1))


def begun(devices, size=1, step=1.0, start=(0.0,)):
    server = Server(torch.tensor(start), ca2fl(size=size, server_lr=step), TrainSpec())
    return server, *sends(server.handle(*map(Joined, range(devices))))


def head(server):
    return server.store.head_params().tolist()


def cache(server, lineage="main"):
    """The sum of a lineage's cached updates, and the updates by device."""
    kept = server.strategy.merge.state()["caches"][lineage]
    return kept.total, kept.last


def test_four_updates_by_hand():
    server, one, two = begun(2)
    (one,) = sends(server.handle(answer(one, 2.0)))
    assert head(server) == [2.0]  # h = 0: v = 2; then h_0 = 2, h = 2 / 2
    (two,) = sends(server.handle(answer(two, 4.0)))
    assert head(server) == [7.0]  # v = 1 + (4 - 0); then h = (2 + 4) / 2
    (one,) = sends(server.handle(answer(one, 1.0)))
    assert head(server) == [9.0]  # v = 3 + (1 - 2); then h = (1 + 4) / 2
    server.handle(answer(one, 1.0))
    assert head(server) == [11.5]  # v = 2.5 + 0: nothing new, and the cached update of the other


def test_a_buffer_of_two_with_a_step_of_a_half():
    server, one, two, three = begun(3, size=2, step=0.5)
    one, two = sends(server.handle(answer(one, 3.0), answer(two, 6.0)))
    assert head(server) == [2.25]  # 0.5 * (3 + 6) / 2; then h = 9 / 3
    server.handle(answer(three, 3.0), answer(one, 1.0))
    # v = 3 + ((3 - 0) + (1 - 3)) / 2 = 3.5
    assert head(server) == [4.0]


def test_two_updates_of_a_device_are_both_compared_with_the_cache_before():
    server, one, two = begun(2, size=2)
    (one, two) = sends(server.handle(answer(one, 4.0), answer(two, 4.0)))
    assert head(server) == [4.0]
    (one,) = sends(server.handle(answer(one, 6.0)))
    server.handle(answer(one, 8.0))
    assert head(server) == [4.0 + 4.0 + (2.0 + 4.0) / 2]
    total, last = cache(server)
    assert last[0][0].tolist() == [8.0]
    assert total.tolist() == [12.0]


def test_devices_that_left_still_count():
    server, one, two = begun(2)
    server.handle(answer(two, 4.0), Left(1))
    server.handle(answer(one, 2.0))
    assert head(server) == [4.0 + 4.0 / 2 + 2.0]


def test_coordinates_are_averaged_over_the_devices_that_train_them():
    server = Server(torch.zeros(2), ca2fl(size=1), TrainSpec())
    wide, narrow = sends(server.handle(Joined(0), Joined(1, FIRST)))
    (wide,) = sends(server.handle(answer(wide, 2.0, 2.0)))
    assert head(server) == [2.0, 2.0]  # nothing of the narrow one is cached: h = (1, 1)
    (narrow,) = sends(server.handle(answer(narrow, 3.0)))
    assert head(server) == [6.0, 2.0]  # v = 1 + 3, and the second was not trained
    server.handle(answer(wide, 2.0, 2.0))
    assert head(server) == [8.5, 4.0]  # h = (5 / 2, 2 / 1), and nothing new


def test_a_device_may_change_its_sub_model():
    server, one, two = begun(2, start=(0.0, 0.0))
    server.handle(answer(one, 2.0, 4.0))
    server.handle(answer(two, 0.0, 0.0))
    (one,) = sends(server.handle(Joined(0, FIRST)))
    server.handle(answer(one, 6.0))
    # h = (1, 2): it moves by 1 + (6 - 2) on the first coordinate. Its update of the second is gone.
    assert head(server) == [2.0 + 1.0 + 1.0 + 4.0, 4.0 + 2.0]
    assert cache(server)[0].tolist() == [6.0, 0.0]


def test_lineages_have_caches_of_their_own():
    strategy = Strategy(merge=CalibratedBuffer(1, 1.0), dispatch=OneLineageEach())
    server = Server(torch.zeros(1), strategy, TrainSpec())
    tasks = sends(server.handle(Joined(0), Joined(1)))
    for _ in range(3):
        tasks = sends(server.handle(*(answer(t, 1.0 + t.device) for t in tasks)))
    # Alone on a lineage, h + (delta - h) is delta.
    assert server.store.head_params("device-0").tolist() == [3.0]
    assert server.store.head_params("device-1").tolist() == [6.0]
    server.absorb("device-0", "device-1")
    assert set(server.strategy.merge.state()["caches"]) == {"device-0"}


def test_updates_in_the_buffer_of_an_absorbed_lineage_are_merged_into_the_other():
    strategy = Strategy(merge=CalibratedBuffer(2, 1.0), dispatch=OneLineageEach())
    server = Server(torch.zeros(1), strategy, TrainSpec())
    one, two = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(two, 6.0))
    server.absorb("device-0", "device-1")
    server.handle(answer(one, 2.0))
    assert server.store.head_params("device-0").tolist() == [4.0]


def test_a_device_that_moves_is_forgotten_where_it_was():
    target = ["main"]
    strategy = Strategy(merge=CalibratedBuffer(1, 1.0), route=lambda contribution, view: target[0])
    server = Server(torch.zeros(1), strategy, TrainSpec())
    one, _ = sends(server.handle(Joined(0), Joined(1)))
    (one,) = sends(server.handle(answer(one, 2.0)))
    server.fork("main", "other")
    target[0] = "other"
    server.handle(answer(one, 5.0))
    total, last = cache(server)
    assert last == {}
    assert total.tolist() == [0.0]
    assert server.store.head_params("other").tolist() == [7.0]


def test_a_bad_option_is_named():
    with pytest.raises(BadInput, match="size"):
        build_strategy("ca2fl", {"size": 0})

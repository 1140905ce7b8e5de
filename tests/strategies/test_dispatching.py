"""The wait clause of the dispatcher, event by event."""

import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Observer, Split, Strategy
from latecomer.strategies.parts.dispatching import ClusterDispatch
from latecomer.strategies.parts.merging import Buffer


def made(size, *observers, wait=True):
    dispatch = ClusterDispatch(wait=True) if wait else ClusterDispatch()
    strategy = Strategy(merge=Buffer(size), dispatch=dispatch, observers=observers)
    return Server(torch.zeros(1), strategy, TrainSpec())


def begun(size, wait=True):
    server = made(size, wait=wait)
    return server, *sends(server.handle(Joined(0), Joined(1)))


def given(server, task):
    """The tasks that follow the update of this one: device and version."""
    update = Update(task.id, torch.ones(1), 1)
    return {t.device: t for t in sends(server.handle(Arrived(task.device, update)))}


def test_a_device_that_has_trained_the_head_waits_for_a_newer_one():
    server, one, two = begun(size=2)
    assert given(server, one) == {}
    tasks = given(server, two)
    assert {device: task.version for device, task in tasks.items()} == {0: 1, 1: 1}


def test_without_wait_the_same_head_is_given_again():
    server, one, _ = begun(size=2, wait=False)
    assert [(d, t.version) for d, t in given(server, one).items()] == [(0, 0)]


def test_the_same_head_is_given_again_if_no_device_is_working():
    server, one, two = begun(size=3)
    assert given(server, one) == {}
    tasks = given(server, two)
    assert {device: task.version for device, task in tasks.items()} == {0: 0, 1: 0}


def test_a_device_that_joins_gets_the_head_at_once():
    server, one, _ = begun(size=2)
    given(server, one)
    assert [t.device for t in sends(server.handle(Joined(7)))] == [7]


class SplitOnce(Observer):
    """Assigns device 1 to a lineage of its own when `ready` is set."""

    ready = False

    def act(self, view):
        if self.ready and "other" not in view.store:
            yield Split("main", "other", (1,))


def test_only_devices_of_the_same_lineage_keep_a_device_waiting():
    server = made(3, SplitOnce())
    one, _, three = sends(server.handle(*map(Joined, range(3))))
    assert given(server, one) == {}
    assert given(server, three) == {}  # device 1 is at work
    server.strategy.observers[0].ready = True
    assert [t.device for t in sends(server.handle())] == [0, 2]


def test_a_restored_dispatcher_waits_as_the_first_did():
    server, one, two = begun(size=2)
    assert given(server, one) == {}
    second = made(size=2)
    second.restore(server.state())
    assert sends(second.handle()) == []
    assert list(given(second, two)) == [0, 1]

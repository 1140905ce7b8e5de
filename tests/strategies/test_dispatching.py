"""Which tasks the plain dispatcher, that of the default strategy, gives."""

import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Observer, Split, Strategy
from latecomer.strategies.parts.merging import Buffer


class SplitOnce(Observer):
    """Assigns device 1 to a lineage of its own."""

    def act(self, view):
        if "other" not in view.store:
            yield Split("main", "other", (1,))


def given(server, task):
    """The tasks that follow the update of this one: device, lineage and version."""
    update = Update(task.id, torch.ones(1), 1)
    tasks = sends(server.handle(Arrived(task.device, update)))
    return [(t.device, t.lineage, t.version) for t in tasks]


def test_an_idle_device_gets_the_head_even_if_it_has_trained_it():
    server = Server(torch.zeros(1), Strategy(merge=Buffer(2)), TrainSpec())
    one, two = sends(server.handle(Joined(0), Joined(1)))
    assert given(server, one) == [(0, "main", 0)]
    assert given(server, two) == [(1, "main", 1)]


def test_a_device_gets_the_head_of_its_lineage():
    strategy = Strategy(merge=Buffer(9), observers=(SplitOnce(),))
    server = Server(torch.zeros(1), strategy, TrainSpec())
    tasks = sends(server.handle(Joined(0), Joined(1)))
    found = [given(server, task)[0][:2] for task in tasks]
    assert found == [(0, "main"), (1, "other")]

"""Pushes of new models to stragglers while they train, as long as these use them."""

import torch
from latecomer.strategies.latecomer.mid_task_push import RECENT_ANSWERS, MidTaskPush

from commands import logged, sends
from latecomer.core.messages import Arrived, Broadcast, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy


def answer(task, choice=0):
    return Arrived(task.device, Update(task.id, torch.ones(1), 1, choice=choice))


class Pair:
    """A fast device, and a slow one whose tasks take `lasts` commits of the other."""

    def __init__(self, behind, lasts, local_epochs=2):
        strategy = Strategy(observers=(MidTaskPush(behind),))
        spec = TrainSpec(local_epochs=local_epochs)
        self.server = Server(torch.zeros(1), strategy, spec)
        self.fast, self.slow = sends(self.server.handle(Joined(0), Joined(1)))
        self.lasts, self.reasons = lasts, []

    def task(self, uses=False):
        """One task of the slow device; the commits after which a model was pushed to it."""
        pushed = []
        for commit in range(1, self.lasts + 1):
            commands = self.handle(answer(self.fast))
            (self.fast,) = sends(commands)
            tasks = [t.device for c in commands if isinstance(c, Broadcast) for t in c.tasks]
            assert tasks in ([], [1])
            pushed += [commit] * len(tasks)
        number = len(self.server.open_tasks[self.slow.id].broadcasts) if uses else 0
        commands = self.handle(answer(self.slow, number))
        (self.slow,) = [t for t in sends(commands) if t.device == 1]
        return pushed

    def handle(self, event):
        commands = self.server.handle(event)
        self.reasons += [fields["reason"] for fields in logged(commands, "switch")]
        return commands


def test_pushes_end_before_the_last_local_epoch():
    pair = Pair(behind=3, lasts=20)
    assert pair.task() == []  # the length of its tasks is unknown yet
    assert pair.task(uses=True) == [3, 6, 9]  # after 10 of 20 commits the last epoch has begun


def test_with_one_local_epoch_nothing_is_pushed():
    pair = Pair(behind=3, lasts=20, local_epochs=1)
    assert [pair.task(), pair.task()] == [[], []]


def test_devices_that_are_not_far_behind_get_nothing():
    pair = Pair(behind=10, lasts=19)
    assert [pair.task(), pair.task()] == [[], []]


def test_pushes_end_when_they_are_not_used():
    pair = Pair(behind=2, lasts=8)
    for _ in range(RECENT_ANSWERS + 1):
        pair.task()
    expected = f"mid-task pushes end: 0 of the last {RECENT_ANSWERS} were used"
    assert pair.reasons == [expected]
    assert not pair.server.parts.broadcasts
    assert pair.task() == []


def test_pushes_go_on_while_they_are_used():
    pair = Pair(behind=2, lasts=8)
    for _ in range(RECENT_ANSWERS + 5):
        pair.task(uses=True)
    assert pair.task() == [2]
    assert pair.server.parts.broadcasts

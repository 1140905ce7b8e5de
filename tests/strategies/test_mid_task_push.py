"""Who is far behind is told in time, as long as that is of use."""

import torch

from commands import sends
from latecomer.core.messages import Arrived, Broadcast, Joined, TrainSpec, Update
from latecomer.core.outcomes import Note, Outcome
from latecomer.core.server import Server
from latecomer.core.strategy import Mix, Strategy
from latecomer.strategies.latecomer.mid_task_push import RECENT_ANSWERS, MidTaskPush


def told(commands):
    return [t.device for c in commands if isinstance(c, Broadcast) for t in c.tasks]


def answer(task, choice=0):
    return Arrived(task.device, Update(task.id, torch.ones(1), 1, choice=choice))


class Pair:
    """A fast device, and a slow one that takes `lasts` commits of the other for a task."""

    def __init__(self, behind, lasts, local_epochs=2):
        spec = TrainSpec(local_epochs=local_epochs)
        self.server = Server(torch.zeros(1), Strategy(merge=MidTaskPush(Mix(), behind)), spec)
        self.fast, self.slow = sends(self.server.handle(Joined(0), Joined(1)))
        self.lasts, self.notes = lasts, []

    def task(self, uses=False):
        """One task of the slow one; at which commits of it there was a broadcast to it."""
        heard = []
        for commit in range(1, self.lasts + 1):
            commands = self.server.handle(answer(self.fast))
            (self.fast,) = sends(commands)
            heard += [commit] * len(told(commands))
            self.notes += [
                c for c in commands if isinstance(c, Outcome | Note) and c.kind == "switch"
            ]
        number = len(self.server.open_tasks[self.slow.id].broadcasts) if uses else 0
        commands = self.server.handle(answer(self.slow, number))
        self.notes += [c for c in commands if isinstance(c, Outcome | Note) and c.kind == "switch"]
        (self.slow,) = [t for t in sends(commands) if t.device == 1]
        return heard


def test_a_straggler_is_told_before_its_last_pass():
    pair = Pair(behind=3, lasts=20)
    assert pair.task() == []  # nobody knows yet how long it takes
    assert pair.task(uses=True) == [3, 6, 9]  # 10 of 20 commits: by then the last pass has begun


def test_with_one_pass_there_is_nothing_to_go_on_from():
    pair = Pair(behind=3, lasts=20, local_epochs=1)
    assert [pair.task(), pair.task()] == [[], []]


def test_who_is_back_soon_is_not_told():
    pair = Pair(behind=10, lasts=19)
    assert [pair.task(), pair.task()] == [[], []]


def test_broadcasts_end_when_they_are_not_used():
    pair = Pair(behind=2, lasts=8)
    for _ in range(RECENT_ANSWERS + 1):
        pair.task()
    (note,) = pair.notes
    assert note.fields["reason"] == f"broadcasts end: 0 of the last {RECENT_ANSWERS} were of use"
    assert not pair.server.strategy.broadcasts
    assert pair.task() == []


def test_broadcasts_go_on_while_they_are_used():
    pair = Pair(behind=2, lasts=8)
    for _ in range(RECENT_ANSWERS + 5):
        pair.task(uses=True)
    assert pair.task() == [2]
    assert pair.server.strategy.broadcasts

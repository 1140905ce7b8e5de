"""Who is far behind is told, as long as that is of use."""

import torch

from latecomer.core.messages import Arrived, Broadcast, Joined, Note, Send, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Mix, Strategy
from latecomer.strategies.telling import RECENT, Telling


def sends(commands):
    return [c.task for c in commands if isinstance(c, Send)]


def told(commands):
    return [t.device for c in commands if isinstance(c, Broadcast) for t in c.tasks]


def answer(task, choice=0):
    return Arrived(task.device, Update(task.id, torch.ones(1), 1, choice=choice))


def begun(behind):
    server = Server(torch.zeros(1), Strategy(merge=Telling(Mix(), behind)), TrainSpec())
    return server, *sends(server.handle(Joined(0), Joined(1)))


def test_only_who_is_so_many_commits_behind_is_told():
    server, fast, _slow = begun(behind=3)
    heard = []
    for _ in range(6):
        commands = server.handle(answer(fast))
        (fast,) = sends(commands)
        heard.append(told(commands))
    assert heard == [[], [], [1], [], [], [1]]  # by then the last it was told is three behind


def test_broadcasts_end_when_they_are_not_used():
    server, fast, slow = begun(behind=2)
    notes = []
    for turn in range(4 * RECENT):
        commands = server.handle(answer(fast))
        (fast,) = sends(commands)
        if turn % 2:
            commands += server.handle(answer(slow))  # from what it began with
            (slow,) = [t for t in sends(commands) if t.device == 1]
        notes += [c for c in commands if isinstance(c, Note) and c.kind == "switch"]
    (note,) = notes
    assert note.fields["reason"] == f"broadcasts end: 0 of the last {RECENT} were of use"
    for _ in range(6):
        commands = server.handle(answer(fast))
        (fast,) = sends(commands)
        assert not told(commands)


def test_broadcasts_go_on_while_they_are_used():
    server, fast, slow = begun(behind=2)
    for turn in range(4 * RECENT):
        commands = server.handle(answer(fast))
        (fast,) = sends(commands)
        if turn % 2:
            number = len(server.open_tasks[slow.id].broadcasts)
            (slow,) = [t for t in sends(server.handle(answer(slow, number))) if t.device == 1]
    assert not server.strategy.merge._off

"""The flagship: each part by itself, all off, and the reasons it gives."""

import pytest
import torch

from latecomer.core.messages import Arrived, Joined, Send, Update
from latecomer.core.outcomes import Note, Outcome
from toy import SIZE, ToyRun, toy_fleet, toy_run, toy_server

OFF = {
    "repair": False,
    "surrogates": False,
    "clusters": 1,
    "broadcast": False,
    "clip": 0.0,
    "wait": True,
    "share": 1.0,
    "step": 1.0,
    "lead": 0.0,
    "reach": 0.0,
    "keep": 0.0,
    "mix": 0.0,
}


def test_all_switched_off_it_is_fedavg_bit_for_bit():
    assert toy_run("latecomer", 60, **OFF).heads() == toy_run("fedavg", 60).heads()


@pytest.mark.parametrize(
    "part",
    [
        {"repair": True},
        {"broadcast": True},
        {"clusters": 4},
        {"share": 0.3, "wait": False},
        {"lead": 1.0},
        {"reach": 0.3},
        {"keep": 0.5, "mix": 1.0},
    ],
    ids=lambda part: next(iter(part)),
)
def test_each_part_alone_runs_and_resumes(part):
    options = {**OFF, **part}
    whole = toy_run("latecomer", 23, **options)
    whole.until(60)
    first = toy_run("latecomer", 23, **options)
    second = first.carried_over(ToyRun(toy_server("latecomer", options), toy_fleet()))
    second.until(60)
    assert second.heads() == whole.heads()
    assert first.log + second.log == whole.log


def test_who_waits_gets_a_task_when_the_model_is_new():
    server = toy_server("latecomer", {**OFF, "share": 0.6})
    tasks = [c.task for c in server.handle(*map(Joined, range(5))) if isinstance(c, Send)]
    again = []
    for task in tasks:
        update = Update(task.id, torch.ones(SIZE), 1)
        again.append(
            [c for c in server.handle(Arrived(task.device, update)) if isinstance(c, Send)]
        )
    assert [len(sent) for sent in again] == [0, 0, 3, 1, 1]


def test_what_is_mostly_noise_is_not_repaired_and_the_log_says_so():
    server = toy_server("latecomer")
    tasks = [c.task for c in server.handle(*map(Joined, range(5))) if isinstance(c, Send)]
    updates = [Update(t.id, torch.ones(SIZE), 1, noise_std=1.0) for t in tasks]
    arrived = [Arrived(t.device, u) for t, u in zip(tasks, updates, strict=True)]
    notes = [
        c for c in server.handle(*arrived) if isinstance(c, Outcome | Note) and c.kind == "switch"
    ]
    reasons = sorted(note.fields["reason"] for note in notes)
    assert ["average" in reasons[0], "repair" in reasons[1], len(reasons)] == [True, True, 2]
    assert not server.strategy.compensate.known

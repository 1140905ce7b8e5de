"""The default strategy: each part alone, all parts off, and the reasons it logs."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import Arrived, Joined, Update
from toy import SIZE, ToyRun, toy_fleet, toy_run, toy_server

ADVANCED_OFF = {
    "wait": True,
    "server_lr": 1.0,
    "norm_clip": 0.0,
    "age_discount": 0.0,
    "control_variate": 0.0,
    "trust_region": 0.0,
    "projection_damping": 0.0,
    "averaging": False,
}
OFF = {
    "share": 1.0,
    "clusters": 1,
    "compensate": False,
    "surrogates": False,
    "push": False,
    "personalise": False,
    "calibrate": 0.0,
    "advanced": ADVANCED_OFF,
}


def only(share=None, advanced=None, **options):
    """All parts off, except these."""
    options = {**OFF, **options, "advanced": {**ADVANCED_OFF, **(advanced or {})}}
    return options if share is None else {**options, "share": share}


def test_all_switched_off_it_is_fedavg_bit_for_bit():
    assert toy_run("latecomer", 60, **OFF).heads() == toy_run("fedavg", 60).heads()


@pytest.mark.parametrize(
    "part",
    [
        {"compensate": True},
        {"compensate": True, "surrogates": True},
        {"push": True},
        {"clusters": 4},
        {"personalise": True},
        {"calibrate": 1.0},
        {"share": 0.3, "advanced": {"wait": False}},
        {"advanced": {"control_variate": 1.0}},
        {"advanced": {"trust_region": 0.3}},
        {"advanced": {"projection_damping": 1.0}},
        {"advanced": {"averaging": True}},
    ],
    ids=str,
)
def test_each_part_alone_runs_and_resumes(part):
    options = only(**part)
    whole = toy_run("latecomer", 23, **options)
    whole.until(60)
    first = toy_run("latecomer", 23, **options)
    second = first.carried_over(ToyRun(toy_server("latecomer", options), toy_fleet()))
    second.until(60)
    assert second.heads() == whole.heads()
    assert first.log + second.log == whole.log


def test_with_wait_a_device_gets_a_task_when_the_model_is_new():
    server = toy_server("latecomer", only(share=0.6))
    sent = []
    for task in sends(server.handle(*map(Joined, range(5)))):
        update = Update(task.id, torch.ones(SIZE), 1)
        sent.append(len(sends(server.handle(Arrived(task.device, update)))))
    assert sent == [0, 0, 3, 1, 1]


def test_updates_that_are_mostly_noise_are_not_compensated():
    server = toy_server("latecomer")
    tasks = sends(server.handle(*map(Joined, range(5))))
    updates = [Update(t.id, torch.ones(SIZE), 1, noise_std=1.0) for t in tasks]
    arrived = [Arrived(t.device, u) for t, u in zip(tasks, updates, strict=True)]
    reasons = sorted(fields["reason"] for fields in logged(server.handle(*arrived), "switch"))
    assert len(reasons) == 2
    assert "average" in reasons[0]
    assert "not compensated" in reasons[1]
    assert not server.strategy.compensate.last

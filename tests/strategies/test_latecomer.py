"""The default strategy: each part alone, all parts off, and the reasons it logs."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import Arrived, Joined, Update
from toy import SIZE, ToyRun, toy_fleet, toy_run, toy_server

OFF = {"share": 1.0, "compensate": False, "surrogates": False}


def test_all_switched_off_and_all_devices_in_a_commit_it_is_fedavg():
    heads = []
    for name, options in (("latecomer", OFF), ("fedavg", {})):
        server = toy_server(name, options)
        tasks = sends(server.handle(*map(Joined, range(5))))
        for number in range(6):
            arrived = []
            for task in sorted(tasks, key=lambda task: task.device):
                delta = torch.full((SIZE,), 1.0 + 0.1 * task.device) / (1 + number)
                arrived.append(Arrived(task.device, Update(task.id, delta, 1 + task.device)))
            tasks = sends(server.handle(*arrived))
        assert server.store.commits == 6
        heads.append(server.store.head_params())
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "part",
    [
        {"compensate": True},
        {"compensate": True, "surrogates": True},
        {"share": 0.3},
    ],
    ids=str,
)
def test_each_part_alone_runs_and_resumes(part):
    options = {**OFF, **part}
    whole = toy_run("latecomer", 23, **options)
    whole.until(60)
    first = toy_run("latecomer", 23, **options)
    second = first.carried_over(ToyRun(toy_server("latecomer", options), toy_fleet()))
    second.until(60)
    assert second.server.store.commits > 1
    assert second.heads() == whole.heads()
    assert first.log + second.log == whole.log


def test_updates_that_are_mostly_noise_are_not_compensated():
    server = toy_server("latecomer")
    tasks = sends(server.handle(*map(Joined, range(5))))
    updates = [Update(t.id, torch.ones(SIZE), 1, noise_std=1.0) for t in tasks]
    arrived = [Arrived(t.device, u) for t, u in zip(tasks, updates, strict=True)]
    (reason,) = [fields["reason"] for fields in logged(server.handle(*arrived), "switch")]
    assert "not compensated" in reason
    assert not server.strategy.compensate.last

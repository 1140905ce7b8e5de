"""Hand-worked AMSGrad steps on a buffer, and slower ones for late updates."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.errors import BadInput
from latecomer.strategies.papers.fadas import fadas
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def answer(task, *delta):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), 1))


def begun(**options):
    strategy = fadas(server_lr=1.0, beta1=0.5, beta2=0.75, eps=2.0, **options)
    server = Server(torch.zeros(1), strategy, TrainSpec())
    return server, *sends(server.handle(Joined(0), Joined(1)))


def head(server):
    return server.store.head_params().item()


def test_three_steps_by_hand():
    server, one, two = begun(size=2)
    one, two = sends(server.handle(answer(one, 3.0), answer(two, 5.0)))
    assert head(server) == 0.5  # the mean is 4: m = 2, v = 16 / 4: 2 / (2 + 2)
    one, two = sends(server.handle(answer(one, 1.0), answer(two, -1.0)))
    assert head(server) == 0.75  # m = 1, v = 3, but the largest v was 4: 1 / 4
    server.handle(answer(one, 8.0), answer(two, 8.0))
    # m = 0.5 + 4, v = 9/4 + 16
    assert head(server) == pytest.approx(0.75 + 4.5 / (18.25**0.5 + 2))


@pytest.mark.parametrize(
    ("tau_c", "commits", "pace"),
    [(1, 0, 1.0), (1, 1, 1.0), (1, 2, 1 / 2), (1, 4, 1 / 4), (4, 4, 1.0), (0, 1, 1.0)],
)
def test_a_buffer_with_a_late_update_makes_a_shorter_step(tau_c, commits, pace):
    server, fast, slow = begun(size=1, tau_c=tau_c)
    for _ in range(commits):
        (fast,) = sends(server.handle(answer(fast, 0.0)))
    server.handle(answer(slow, 4.0))
    assert head(server) == pytest.approx(pace * 0.5)


def test_the_stalest_of_the_buffer_decides():
    server, fast, slow = begun(size=2)
    for _ in range(3):
        for _ in range(2):
            (fast,) = sends(server.handle(answer(fast, 0.0)))
    (fast,) = sends(server.handle(answer(fast, 4.0)))
    server.handle(answer(slow, 4.0))
    assert head(server) == pytest.approx(0.5 / 3)


def test_without_late_updates_the_threshold_does_not_matter():
    never = toy_run("fadas", 60, tau_c=10**9)
    late = max(fields["staleness"] for _, fields in never.lines("arrival"))
    assert late > 1
    assert toy_run("fadas", 60, tau_c=late).heads() == never.heads()
    assert toy_run("fadas", 60, tau_c=late - 1).heads() != never.heads()


def test_a_bad_option_is_named():
    with pytest.raises(BadInput, match="tau_c"):
        build_strategy("fadas", {"tau_c": -1})

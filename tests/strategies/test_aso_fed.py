"""ASO-Fed by hand, and the limits in which it is a plain step along each delta."""

import math

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.errors import BadInput
from latecomer.strategies.papers.aso_fed import aso_fed, step_scale
from latecomer.strategies.parts.merging import Buffer
from latecomer.strategies.parts.weighting import ByShareOfExamples
from latecomer.strategies.recipe import build_strategy
from toy import SIZE, ToyRun, toy_fleet, toy_run, toy_server

PLAIN = {"lam": 0.0, "beta": 0.0, "dynamic": False}


def answer(task, *delta, examples=1, seconds=0.0):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples), seconds)


def head(server):
    return server.store.head_params().tolist()


def test_the_model_moves_by_the_share_of_examples():
    server = Server(torch.zeros(1), aso_fed(), TrainSpec())
    a, b = sends(server.handle(Joined(0), Joined(1)))
    # The other one counts with the mean of those heard of: 30 of 60.
    (a,) = sends(server.handle(answer(a, 8.0, examples=30)))
    assert head(server) == [4.0]
    (b,) = sends(server.handle(answer(b, 8.0, examples=10)))
    assert head(server) == [6.0]  # + 10 / 40 * 8
    server.handle(answer(a, 4.0, examples=30))
    assert head(server) == [9.0]  # + 30 / 40 * 4
    server.handle(answer(b, -5.0, examples=20))
    assert head(server) == [7.0]  # its data have grown: - 20 / 50 * 5


def test_the_server_learning_rate_scales_the_step():
    server = Server(torch.zeros(1), aso_fed(server_lr=2.0), TrainSpec())
    a, _ = sends(server.handle(Joined(0), Joined(1)))
    server.handle(answer(a, 1.0))
    assert head(server) == [1.0]


def test_devices_are_held_near_and_mix_their_gradients():
    spec = Server(torch.zeros(1), aso_fed(lam=0.3, beta=0.2), TrainSpec()).spec
    assert (spec.prox, spec.balance) == (0.3, 0.2)


def test_the_step_grows_with_the_logarithm_of_the_mean_delay():
    assert [step_scale(delay) for delay in (0.0, 0.5, 1.0, math.e)] == [1.0] * 4
    assert step_scale(math.e**2) == pytest.approx(2.0)


def test_slow_devices_take_larger_steps():
    server = Server(torch.zeros(1), aso_fed(), TrainSpec(lr_scale=0.5))
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    assert (fast.spec.lr_scale, slow.spec.lr_scale) == (0.5, 0.5)  # nothing is known of them
    for _ in range(2):
        (fast,) = sends(server.handle(answer(fast, 0.0, seconds=2.0)))
    assert fast.spec is server.spec
    (slow,) = sends(server.handle(answer(slow, 0.0, seconds=10.0)))
    assert slow.spec.lr_scale == pytest.approx(0.5 * math.log(10))
    (slow,) = sends(server.handle(answer(slow, 0.0, seconds=90.0)))
    assert slow.spec.lr_scale == pytest.approx(0.5 * math.log(50))  # the mean


def test_without_dynamic_steps_all_train_alike():
    run = ToyRun(Server(torch.zeros(SIZE), aso_fed(dynamic=False), TrainSpec()), toy_fleet(40))
    run.until(200)
    assert {task.spec for task in run.server.open_tasks.values()} == {run.server.spec}
    # The slowest of this fleet take up to 40 seconds.
    other = ToyRun(Server(torch.zeros(SIZE), aso_fed(), TrainSpec()), toy_fleet(40))
    other.until(200)
    scales = {task.device: task.spec.lr_scale for task in other.server.open_tasks.values()}
    assert scales[0] == 1.0
    assert scales[19] == pytest.approx(math.log(20))


def test_its_limit_is_a_plain_step_along_each_delta():
    ours = toy_run("aso-fed", 60, **PLAIN)
    plain = Strategy(weigh=ByShareOfExamples(), merge=Buffer(1))
    other = ToyRun(Server(torch.zeros(SIZE), plain, TrainSpec(lr=0.5), seed=7), toy_fleet())
    other.until(60)
    assert ours.heads() == other.heads()
    assert ours.server.spec == other.server.spec


def test_alone_a_device_takes_its_whole_step():
    run = toy_run("aso-fed", 5, toy_fleet(1), **PLAIN)
    plain = toy_run("fedbuff", 5, toy_fleet(1), size=1, decay="constant")
    assert run.heads() == plain.heads()


def test_delays_and_examples_are_part_of_the_state():
    one = toy_run("aso-fed", 60)
    other = toy_server("aso-fed")
    other.restore(one.server.state())
    assert other.parts.state() == one.server.parts.state()
    assert one.server.parts.state()["merge"]["delays"][4][1] > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("lam", -1.0), ("beta", 1.5), ("dynamic", 1), ("server_lr", 0.0)],
)
def test_bad_options_are_named(key, value):
    with pytest.raises(BadInput, match=key):
        build_strategy("aso-fed", {key: value})

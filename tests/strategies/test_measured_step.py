"""The gain of the server step, from two visits of a device, by hand."""

import math

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel
from latecomer.strategies.latecomer.measured_step import FIRST_GAIN, MeasuredStep

HERE, MOVED = (0.0, 0.0), (3.0, 4.0)  # bases at a distance of 5


def visit(step, base, delta, device=0, factor=1.0, members=4, noise=0.0, submodel=None):
    base, delta = torch.tensor(base), torch.tensor(delta)
    task = Task(0, device, 0, "main", 0, TrainSpec(), base, submodel=submodel)
    update = Update(0, delta, 1, noise_std=noise)
    step.record(Contribution(task, update, base, delta, "main", 0), factor, members, seed=1)


def lipschitz(step):
    """L, from the gain that no other bound limits."""
    step.gain = 1e9
    return 2.0 / step.advance(1e-9)


def two_visits(change=(0.3, 0.4), **second):
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0))
    visit(step, MOVED, (1.0 + change[0], 1.0 + change[1]), **second)
    return step


def test_lipschitz_constant_of_two_visits():
    assert lipschitz(two_visits()) == pytest.approx(0.1)  # 0.5 / 5


def test_gain_is_two_over_the_lipschitz_constant():
    step = two_visits(change=(3.0, 1.0))
    assert step.advance(0.1) == pytest.approx(min(2 / (math.sqrt(10) / 5), 2 * 3**0.1))
    step.gain = 4.0
    assert step.advance(0.1) == step.gain == pytest.approx(10 / math.sqrt(10))


def test_gain_grows_threefold_per_fleet_pass():
    step = two_visits()
    assert step.advance(0.1) == pytest.approx(2 * 3**0.1)
    assert step.advance(0.1) == pytest.approx(2 * 3**0.2)


def test_gain_is_at_most_one_mean_update_per_commit():
    step = two_visits()
    step.gain = 19.0
    assert step.advance(0.5) == 2.0
    assert step.advance(1.0) == 1.0


def test_gain_is_at_least_1():
    assert two_visits(change=(30.0, 40.0)).advance(0.1) == 1.0  # L = 10
    assert two_visits().advance(2.0) == 1.0


def test_without_a_second_visit_the_gain_is_the_first():
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0))
    visit(step, MOVED, (9.0, 9.0), device=1)
    assert step.advance(0.1) == step.advance(1.0) == FIRST_GAIN == 2.0


def test_an_unmoved_base_and_an_equal_update_do_not_divide_by_0():
    step = MeasuredStep()
    for _ in range(2):
        visit(step, HERE, (1.0, 1.0))
    assert step.advance(0.1) == 2.0  # nothing has moved
    visit(step, MOVED, (1.0, 1.0))
    assert step.advance(0.5) == 2.0  # L = 0: one mean update per commit


def test_sums_are_forgotten_by_one_over_the_members():
    step = two_visits(members=4)  # change 0.25, move 25
    visit(step, HERE, (1.3, 2.4), members=4)  # change 1, move 25
    assert lipschitz(step) == pytest.approx(math.sqrt((0.75 * 0.25 + 1) / (0.75 * 25 + 25)))
    step = two_visits(members=1)
    visit(step, HERE, (1.3, 2.4), members=1)  # at most half is forgotten
    assert lipschitz(step) == pytest.approx(math.sqrt((0.5 * 0.25 + 1) / (0.5 * 25 + 25)))


def test_a_visit_is_compared_with_the_previous_one_of_its_device():
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0), device=0)
    visit(step, HERE, (70.0, 80.0), device=1)
    visit(step, MOVED, (1.3, 1.4), device=0)
    assert lipschitz(step) == pytest.approx(0.1)


def test_known_noise_is_subtracted_from_the_change():
    # The squared change is 0.25 over two coordinates; 2 * 0.3^2 of it is noise of the second visit.
    step = two_visits(noise=0.3)
    assert lipschitz(step) == pytest.approx(math.sqrt(0.25 - 0.18) / 5)
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0), noise=0.2)
    visit(step, MOVED, (1.3, 1.4), noise=0.2)
    assert lipschitz(step) == pytest.approx(math.sqrt(0.25 - 4 * 0.04) / 5)
    assert two_visits(noise=9.0).advance(0.1) == pytest.approx(2 * 3**0.1)  # all is noise: L = 0


def test_the_factor_applies_to_the_delta_and_its_noise():
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0))
    visit(step, MOVED, (2.6, 2.8), factor=0.5, noise=0.6)
    assert lipschitz(step) == pytest.approx(math.sqrt(0.25 - 2 * 0.09) / 5)


def test_a_change_of_sub_model_is_no_second_visit():
    halves = [Submodel(name, torch.tensor(index)) for name, index in (("a", [0, 1]), ("b", [2, 3]))]
    step = MeasuredStep()
    visit(step, HERE, (1.0, 1.0), submodel=halves[0])
    visit(step, MOVED, (9.0, 9.0), submodel=halves[1])
    step.gain = 5.0
    assert step.advance(0.1) == 5.0
    visit(step, HERE, (9.3, 9.4), submodel=halves[1])
    assert lipschitz(step) == pytest.approx(0.1)


def test_large_models_are_measured_on_the_same_coordinates_every_time():
    step, other = MeasuredStep(), MeasuredStep()
    for each in (step, other):
        visit(each, [0.0] * 5000, [0.0] * 5000)
        visit(each, [1.0] * 5000, [0.5] * 5000)
        assert lipschitz(each) == pytest.approx(0.5)
    (kept,) = step.state()["visits"].values()
    assert kept.base.numel() == kept.delta.numel() == 1024


def test_a_restored_step_continues_bit_for_bit():
    step, again = two_visits(), MeasuredStep()
    again.restore(decode(*encode(step.state())))
    for each in (step, again):
        visit(each, HERE, (0.7, 0.1))
    assert again.advance(0.3) == step.advance(0.3)
    assert again.state()["changes"] == step.state()["changes"] > 0.25

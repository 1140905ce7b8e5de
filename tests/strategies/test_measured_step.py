"""The gain of the server step, from commits of devices that report twice, by hand."""

import math

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel
from latecomer.strategies.latecomer.measured_step import (
    FIRST_GAIN,
    MAX_GROWTH,
    MIN_GAIN,
    SAFE,
    MeasuredStep,
)

HERE, MOVED = (0.0, 0.0), (3.0, 4.0)  # bases at a distance of 5
LARGE = 10**9  # members: nothing is forgotten, and only SAFE / L bounds the gain from above
HALVES = [Submodel(name, torch.tensor(index)) for name, index in (("a", [0, 1]), ("b", [2, 3]))]


def update(base, delta, device=0, factor=1.0, weight=1.0, staleness=0, noise=0.0, submodel=None):
    """An update and the factor that clips it."""
    base, delta = torch.tensor(base), torch.tensor(delta)
    task = Task(0, device, 0, "main", 0, TrainSpec(), base, submodel=submodel)
    answer = Update(0, delta, 1, noise_std=noise)
    return Contribution(task, answer, base, delta, "main", staleness, weight), factor


def commit(step, *updates, members=LARGE, gain=None):
    """The gain of a commit; `gain` replaces the one of the commit before."""
    step.gain = step.gain if gain is None else gain
    return step.advance(updates, members, seed=1)


def second(first, *updates, **settings):
    """The gain of the second of two commits, without a bound on its growth."""
    step = MeasuredStep()
    commit(step, *first)
    return commit(step, *updates, gain=1e9, **settings)


def lipschitz(first, *updates):
    return SAFE / second(first, *updates)


def along(slope, across):
    """A change of `slope` times against the movement, and `across` times perpendicular to it."""
    return (1.0 - 3 * slope - 4 * across, 1.0 - 4 * slope + 3 * across)


def gain_of(slope, across, members=LARGE):
    return second([update(HERE, (1.0, 1.0))], update(MOVED, along(slope, across)), members=members)


def test_lipschitz_constant_of_one_device():
    found = lipschitz([update(HERE, (1.0, 1.0))], update(MOVED, (1.3, 1.4)))
    assert found == pytest.approx(0.1)  # 0.5 / 5


def test_lipschitz_constant_of_the_mean_update():
    """Changes of (5.3, 0.4) and (-4.7, 0.4) have the mean (0.3, 0.4)."""
    first = [update(HERE, (1.0, 1.0), 0), update(HERE, (2.0, 2.0), 1)]
    found = lipschitz(first, update(MOVED, (6.3, 1.4), 0), update(MOVED, (-2.7, 2.4), 1))
    assert found == pytest.approx(0.1)


def test_lipschitz_constant_of_the_mean_movement():
    """Bases that move by (3, 4) and (-3, 4) move by (0, 4) on average."""
    first = [update(HERE, (1.0, 1.0), 0), update(HERE, (1.0, 1.0), 1)]
    found = lipschitz(first, update(MOVED, (1.3, 1.4), 0), update((-3.0, 4.0), (1.3, 1.4), 1))
    assert found == pytest.approx(0.5 / 4)


def test_means_are_weighted():
    """Changes of (0.4, 0) with weight 3 and (0, 1.6) with weight 1 have the mean (0.3, 0.4)."""
    first = [update(HERE, (1.0, 1.0), device, weight=9.0) for device in (0, 1)]
    again = update(MOVED, (1.4, 1.0), 0, weight=3.0), update(MOVED, (1.0, 2.6), 1, weight=1.0)
    assert lipschitz(first, *again) == pytest.approx(0.1)


def test_the_gain_is_a_constant_over_the_lipschitz_constant():
    assert gain_of(slope=-0.3, across=0.4) == pytest.approx(SAFE / 0.5)
    assert gain_of(slope=0.0, across=0.01) == pytest.approx(SAFE / 0.01)
    assert gain_of(slope=1.25, across=0.0) == pytest.approx(SAFE / 1.25)


@pytest.mark.parametrize(
    ("slope", "least"),
    [(-9.0, 1.0), (0.0, 1.0), (0.9, 1.0), (2.0, 0.5), (3.0, 1 / 3), (40.0, MIN_GAIN)],
)
def test_the_gain_is_at_least_one_over_a_slope_above_1(slope, least):
    """A large change across the movement makes SAFE / L smaller than any of these."""
    assert gain_of(slope, across=90.0) == pytest.approx(least)


def test_the_slope_is_that_of_the_mean_change_along_the_mean_movement():
    """Changes across the movement that cancel out leave L = s = 2."""
    first = [update(HERE, (1.0, 1.0), device) for device in (0, 1)]
    again = [update(MOVED, along(2.0, across), device) for device, across in enumerate((50, -50))]
    assert second(first, *again) == pytest.approx(SAFE / 2)


def test_noise_across_the_movement_does_not_change_the_least_gain():
    assert gain_of(2.0, 30.0) == pytest.approx(gain_of(2.0, 300.0)) == pytest.approx(0.5)


def test_the_gain_grows_by_a_factor_per_fleet_pass():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)), members=10)
    for commits in (1, 2):
        moved = update((3.0 * commits, 4.0 * commits), (1.0, 1.0))
        assert commit(step, moved, members=10) == pytest.approx(
            FIRST_GAIN * MAX_GROWTH ** (0.1 * commits)
        )


def test_the_gain_is_at_most_one_mean_update_per_commit():
    assert gain_of(slope=0.01, across=0.0, members=7) == pytest.approx(7.0)
    assert gain_of(slope=0.01, across=0.0, members=1) == pytest.approx(1.0)
    first = [update(HERE, (1.0, 1.0), device) for device in (0, 1)]
    again = [update(MOVED, (1.0, 1.1), device) for device in (0, 1)]
    assert second(first, *again, members=7) == pytest.approx(3.5)


def test_without_a_second_visit_the_gain_is_the_first():
    step = MeasuredStep()
    for device, base in enumerate((HERE, MOVED, (9.0, 9.0))):
        assert commit(step, update(base, (device, 1.0), device), members=4) == FIRST_GAIN


def test_an_unmoved_base_and_an_equal_update_do_not_divide_by_0():
    step = MeasuredStep()
    for _ in range(2):
        assert commit(step, update(HERE, (1.0, 1.0)), members=2) == FIRST_GAIN  # nothing has moved
    assert commit(step, update(MOVED, (1.0, 1.0)), members=3, gain=9.0) == 3.0  # L = 0


def test_the_gain_is_divided_by_the_root_of_1_plus_the_mean_staleness_in_fleet_passes():
    step = MeasuredStep()
    late = update(HERE, (1.0, 1.0), 0, staleness=6), update(HERE, (1.0, 1.0), 1, staleness=10)
    # Eight commits of two of four devices are four passes; half of the average is replaced.
    assert commit(step, *late, members=4) == pytest.approx(FIRST_GAIN / math.sqrt(1 + 2))
    punctual = [update(HERE, (1.0, 1.0), device) for device in (2, 3)]
    assert commit(step, *punctual, members=4) == pytest.approx(FIRST_GAIN / math.sqrt(1 + 1))
    assert step.gain == FIRST_GAIN
    # Ten commits of one of ten devices are one pass, and a tenth of the average is replaced.
    step, late = MeasuredStep(), update(HERE, (1.0, 1.0), staleness=10)
    assert commit(step, late, members=10) == pytest.approx(FIRST_GAIN / math.sqrt(1 + 0.1))


def test_the_delay_divides_the_least_gain_too():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)), members=2)
    found = commit(step, update(MOVED, along(-9.0, 0.0), staleness=12), members=2)
    assert found == pytest.approx(1 / math.sqrt(1 + 0.5 * 6))


@pytest.mark.parametrize(("members", "keep"), [(4, 0.75), (2, 0.5), (1, 0.5)])
def test_a_commit_forgets_its_share_of_a_fleet_pass_and_at_most_half(members, keep):
    step = MeasuredStep()
    # Changes of 9, then 16; the base moves by 25 each time, along 9 and against 16 of it.
    for base, delta in ((HERE, (1.0, 1.0)), (MOVED, (-2.0, 1.0)), (HERE, (-2.0, 5.0))):
        commit(step, update(base, delta), members=members)
    state = step.state()
    assert state["changes"] == pytest.approx(keep * 9 + 16)
    assert state["moves"] == pytest.approx(keep * 25 + 25)
    assert state["slopes"] == pytest.approx(keep * 9 + 16)


def test_a_commit_of_new_devices_forgets_nothing():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)))
    commit(step, update(MOVED, (-2.0, 1.0)), members=2)
    before = step.state()
    commit(step, update(HERE, (9.0, 9.0), device=1), members=2)
    assert [step.state()[name] for name in ("changes", "moves", "slopes")] == [9.0, 25.0, 9.0]
    assert before["moves"] == 25.0


def test_a_visit_is_compared_with_the_previous_one_of_its_device():
    first = [update(HERE, (1.0, 1.0), 0), update(HERE, (70.0, 80.0), 1)]
    assert lipschitz(first, update(MOVED, (1.3, 1.4), 0)) == pytest.approx(0.1)


def test_known_noise_is_subtracted_from_the_change():
    # The squared change is 0.25 over two coordinates; 2 * 0.3^2 of it is noise of the second visit.
    plain = [update(HERE, (1.0, 1.0))]
    found = lipschitz(plain, update(MOVED, (1.3, 1.4), noise=0.3))
    assert found == pytest.approx(math.sqrt(0.25 - 2 * 0.09) / 5)
    found = lipschitz([update(HERE, (1.0, 1.0), noise=0.2)], update(MOVED, (1.3, 1.4), noise=0.2))
    assert found == pytest.approx(math.sqrt(0.25 - 4 * 0.04) / 5)
    assert second(plain, update(MOVED, (1.3, 1.4), noise=9.0), members=7) == 7.0  # L = 0


def test_the_noise_of_a_mean_is_that_of_its_weighted_terms():
    """Weights 3 and 1: the variance of the mean is (9 + 1) / 16 of 0.3^2, per coordinate."""
    first = [update(HERE, (1.0, 1.0), device) for device in (0, 1)]
    again = [
        update(MOVED, (1.3, 1.4), device, weight=weight, noise=0.3)
        for device, weight in enumerate((3.0, 1.0))
    ]
    expected = math.sqrt(0.25 - 2 * 10 / 16 * 0.09) / 5
    assert lipschitz(first, *again) == pytest.approx(expected)


def test_the_factor_applies_to_the_delta_and_its_noise():
    again = update(MOVED, (2.6, 2.8), factor=0.5, noise=0.6)
    found = lipschitz([update(HERE, (1.0, 1.0))], again)
    assert found == pytest.approx(math.sqrt(0.25 - 2 * 0.09) / 5)


def test_a_change_of_sub_model_is_no_second_visit():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0), submodel=HALVES[0]))
    assert commit(step, update(MOVED, (9.0, 9.0), submodel=HALVES[1]), gain=5.0) == 5.0
    found = commit(step, update(HERE, (9.3, 9.4), submodel=HALVES[1]), gain=1e9)
    assert found == pytest.approx(SAFE / 0.1)


def test_means_of_sub_models_are_added_by_their_share_of_the_weight():
    """Squared changes of 0.09 with weight 1 of 4 and 0.01 with weight 3 of 4; both move by 5."""
    first = [update(HERE, (1.0, 1.0), device, submodel=HALVES[device]) for device in (0, 1)]
    again = [
        update(MOVED, delta, device, weight=weight, submodel=HALVES[device])
        for device, (delta, weight) in enumerate((((1.3, 1.0), 1.0), ((1.0, 1.1), 3.0)))
    ]
    expected = math.sqrt((0.09 + 3 * 0.01) / 4) / 5
    assert lipschitz(first, *again) == pytest.approx(expected)


def test_large_models_are_measured_on_the_same_coordinates_every_time():
    first, again = update([0.0] * 5000, [0.0] * 5000), update([1.0] * 5000, [0.5] * 5000)
    assert lipschitz([first], again) == pytest.approx(0.5)
    step = MeasuredStep()
    commit(step, first)
    (kept,) = step.state()["visits"].values()
    assert kept.base.numel() == kept.delta.numel() == 1024


def test_a_restored_step_continues_bit_for_bit():
    step, again = MeasuredStep(), MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0), staleness=3), members=4)
    commit(step, update(MOVED, (-1.0, 1.4)), members=4)
    again.restore(decode(*encode(step.state())))
    found = {commit(each, update(HERE, (0.7, 0.1)), members=4) for each in (step, again)}
    assert len(found) == 1
    sums = ("gain", "delay", "changes", "moves", "slopes")
    assert [again.state()[name] for name in sums] == [step.state()[name] for name in sums]
    assert all(step.state()[name] for name in sums)

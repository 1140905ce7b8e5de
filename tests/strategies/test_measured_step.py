"""The gain of the server step, from devices that report twice, by hand."""

import math

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel
from latecomer.strategies.latecomer.measured_step import (
    COORDINATES,
    FIRST_GAIN,
    FIRST_MOVEMENT,
    MAX_GROWTH,
    MIN_GAIN,
    SAFE,
    MeasuredStep,
)

HERE, MOVED = (0.0, 0.0), (3.0, 4.0)  # bases at a distance of 5
LARGE = 10**9  # members: only SAFE / L bounds the gain from above
HALVES = [Submodel(name, torch.tensor(index)) for name, index in (("a", [0, 1]), ("b", [2, 3]))]


def update(base, delta, device=0, factor=1.0, weight=1.0, staleness=0, submodel=None, noise=0.0):
    """An update and the factor that clips it."""
    base, delta = torch.tensor(base), torch.tensor(delta)
    task = Task(0, device, 0, "main", 0, TrainSpec(), base, submodel=submodel)
    answer = Update(0, delta, 1, noise_std=noise)
    return Contribution(task, answer, base, delta, "main", staleness, weight), factor


def commit(step, *updates, members=LARGE, gain=None, relative=math.inf):
    """The gain of a commit; `gain` replaces the one of the commit before."""
    step.gain = step.gain if gain is None else gain
    return step.advance(updates, members, 1, relative)


def measured(*changes, members, weights=None, moves=None):
    """The step after devices have changed their updates by these, and their bases have moved."""
    step = MeasuredStep()
    weights, moves = weights or [1.0] * len(changes), moves or [MOVED] * len(changes)
    commit(step, *(update(HERE, (1.0, 1.0), d, weight=9.0) for d in range(len(changes))))
    again = [
        update(move, (1.0 + x, 1.0 + y), device, weight=weight)
        for device, ((x, y), move, weight) in enumerate(zip(changes, moves, weights, strict=True))
    ]
    # As many members as the devices would also bound the gain by one mean update per commit.
    step.gain = 1e9
    for each in again:
        step._visit(*each, 1)
    return step._lipschitz(members)


def gain_of(change, members=LARGE):
    """The gain after one device has changed its update by this, and its base has moved by 5."""
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)))
    again = update(MOVED, (1.0 + change[0], 1.0 + change[1]))
    return commit(step, again, gain=1e9, members=members)


def test_lipschitz_constant_of_one_device():
    assert measured((0.3, 0.4), members=1) == pytest.approx((0.1, 0.0))  # 0.5 / 5; it has no pair


def test_lipschitz_constant_of_the_whole_fleet_is_that_of_the_mean():
    """Changes of (5.3, 0.4) and (-4.7, 0.4) have the mean (0.3, 0.4)."""
    found, without_noise = measured((5.3, 0.4), (-4.7, 0.4), members=2)
    assert found == pytest.approx(0.1)
    assert without_noise == 0.0  # <(5.3, 0.4), (-4.7, 0.4)> is negative


def test_equal_changes_are_no_noise():
    assert measured((0.3, 0.4), (0.3, 0.4), members=7) == pytest.approx((0.1, 0.1))


def test_what_a_device_shares_with_none_counts_as_one_of_the_members():
    """Changes (2, 1) and (-2, 1): own pairs 5 + 5, others 2 * (1 - 4); movements: 50 and 50."""
    # Five members, two known: others count (5 - 1) / (2 - 1) times.
    found, without_noise = measured((2.0, 1.0), (-2.0, 4.0), members=5)
    assert found == pytest.approx(math.sqrt((5 + 20 + 4 * 0) / (50 + 4 * 50)))
    assert without_noise == 0.0
    found, without_noise = measured((2.0, 1.0), (-1.0, 4.0), members=5)
    assert found == pytest.approx(math.sqrt((5 + 17 + 4 * 4) / (50 + 4 * 50)))
    assert without_noise == pytest.approx(math.sqrt(4 / 50))


def test_lipschitz_constant_of_the_mean_movement():
    """Bases that move by (3, 4) and (-3, 4) move by (0, 4) on average."""
    found, _ = measured((0.3, 0.4), (0.3, 0.4), members=2, moves=[MOVED, (-3.0, 4.0)])
    assert found == pytest.approx(0.5 / 4)


def test_movements_that_point_away_from_each_other_are_compared_one_by_one():
    found, without_noise = measured((0.3, 0.4), (0.3, 0.4), members=9, moves=[MOVED, (-3.0, -4.0)])
    assert (found, without_noise) == (pytest.approx(0.1), 0.0)


def test_means_are_weighted():
    """Changes of (0.4, 0) with weight 3 and (0, 1.6) with weight 1 have the mean (0.3, 0.4)."""
    found, without_noise = measured((0.4, 0.0), (0.0, 1.6), members=2, weights=[3.0, 1.0])
    assert found == pytest.approx(0.1)
    assert without_noise == 0.0


def test_an_update_without_weight_is_not_measured():
    found, _ = measured((9.0, 9.0), (0.3, 0.4), members=2, weights=[0.0, 1.0])
    assert found == pytest.approx(0.1)


def test_the_gain_is_a_constant_over_the_lipschitz_constant():
    assert gain_of((1.5, 2.0)) == pytest.approx(SAFE / 0.5)
    assert gain_of((0.03, 0.04)) == pytest.approx(SAFE / 0.01, rel=1e-5)
    assert gain_of((0.0, 90.0)) == 1.0  # L is 18, but noise may be all of it


@pytest.mark.parametrize(("lipschitz", "least"), [(0.9, 1.0), (2.0, 0.5), (40.0, MIN_GAIN)])
def test_the_gain_is_at_least_one_over_a_constant_without_noise_above_1(lipschitz, least):
    """Both devices change by this much against the movement, one also by 4,500 across it."""
    step = MeasuredStep()
    commit(step, *(update(HERE, (1.0, 1.0), device) for device in (0, 1)))
    again = [
        update(MOVED, (1 - 3 * lipschitz - 4 * own, 1 - 4 * lipschitz + 3 * own), device)
        for device, own in enumerate((0.0, 900.0))
    ]
    assert commit(step, *again, gain=1e9, members=2) == pytest.approx(least, rel=1e-3)


def test_the_gain_grows_by_a_factor_per_fleet_pass():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)), members=10)
    for commits in (1, 2):
        moved = update((3.0 * commits, 4.0 * commits), (1.0, 1.0))
        assert commit(step, moved, members=10) == pytest.approx(
            FIRST_GAIN * MAX_GROWTH ** (0.1 * commits)
        )


def test_the_gain_is_at_most_one_mean_update_per_commit():
    assert gain_of((0.0, 0.01), members=7) == pytest.approx(7.0)
    assert gain_of((0.0, 0.01), members=1) == pytest.approx(1.0)
    step = MeasuredStep()
    for gain in (None, 1e9):
        both = [update(MOVED if gain else HERE, (1.0, 1.0), device) for device in (0, 1)]
        found = commit(step, *both, members=7, gain=gain)
    assert found == pytest.approx(3.5)
    assert commit(MeasuredStep(), *both, members=7, relative=1e-9) == pytest.approx(3.5)


def test_the_first_gain_moves_the_model_by_a_share_of_its_norm_per_fleet_pass():
    for relative, gain in ((0.5, FIRST_GAIN), (0.0, FIRST_GAIN), (0.001, FIRST_MOVEMENT / 0.001)):
        assert commit(MeasuredStep(), update(HERE, (1.0, 1.0)), relative=relative) == gain
    step = MeasuredStep()
    for device, base in enumerate((HERE, MOVED, (9.0, 9.0))):  # none reports twice
        found = commit(step, update(base, (device, 1.0), device), members=4, relative=0.02)
        assert found == pytest.approx(2.5)


def test_an_unmoved_base_and_an_equal_update_do_not_divide_by_0():
    step = MeasuredStep()
    for _ in range(2):
        assert commit(step, update(HERE, (1.0, 1.0)), members=2) == FIRST_GAIN  # nothing has moved
    assert commit(step, update(MOVED, (1.0, 1.0)), members=3, gain=9.0) == 3.0  # L = 0


def test_the_gain_is_divided_by_1_plus_the_mean_staleness_in_fleet_passes():
    step = MeasuredStep()
    late = update(HERE, (1.0, 1.0), 0, staleness=6), update(HERE, (1.0, 1.0), 1, staleness=10)
    # Eight commits of two of four devices are four passes; half of the average is replaced.
    assert commit(step, *late, members=4) == pytest.approx(FIRST_GAIN / (1 + 2))
    punctual = [update(HERE, (1.0, 1.0), device) for device in (2, 3)]
    assert commit(step, *punctual, members=4) == pytest.approx(FIRST_GAIN / (1 + 1))
    assert step.gain == FIRST_GAIN
    # Ten commits of one of ten devices are one pass, and a tenth of the average is replaced.
    step, late = MeasuredStep(), update(HERE, (1.0, 1.0), staleness=10)
    assert commit(step, late, members=10) == pytest.approx(FIRST_GAIN / (1 + 0.1))


def test_a_device_is_compared_with_its_previous_update_and_counts_once():
    step = MeasuredStep()
    for base, delta in ((HERE, (1.0, 1.0)), (MOVED, (80.0, 1.0)), (HERE, (79.7, 0.6))):
        commit(step, update(base, delta))
    commit(step, update(HERE, (70.0, 80.0), device=1))  # its first
    assert step._lipschitz(1) == pytest.approx((0.1, 0.0), rel=1e-5)


def test_a_forgotten_device_leaves_the_sums():
    step = MeasuredStep()
    for base, change in ((HERE, (0.0, 0.0)), (MOVED, (0.3, 0.4))):
        extra = [update(base, (9 * change[0], 0.0), 1), update(base, (1.0, 7 * change[1]), 2)]
        commit(step, update(base, change), *extra)
    step.forget(1)
    step.forget(2)
    step.forget(2)
    assert step._lipschitz(1) == pytest.approx((0.1, 0.0), rel=1e-5)
    step.forget(0)
    assert step._lipschitz(1) is None


def test_the_factor_applies_to_the_delta_and_its_noise():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0)))
    found = commit(step, update(MOVED, (2.6, 2.8), factor=0.5, noise=0.6), gain=1e9)
    assert found == pytest.approx(SAFE / (math.sqrt(0.25 - 2 * 0.09) / 5))


def test_known_noise_is_subtracted_from_what_a_device_shares_with_none():
    """Squared changes of 4 * 0.25 each on two coordinates; the noise of two updates, weight 2."""
    step = MeasuredStep()
    for base, delta, noise in ((HERE, (1.0, 1.0), 0.2), (MOVED, (1.3, 1.4), 0.1)):
        commit(step, *(update(base, delta, d, weight=2.0, noise=noise) for d in (0, 1)))
    own, others = 2 * (0.25 - 2 * (0.04 + 0.01)), 2 * 0.25
    expected = math.sqrt((own + 4 * others) / (50 + 4 * 50))
    assert step._lipschitz(5) == pytest.approx((expected, 0.1), rel=1e-5)
    commit(step, update(HERE, (1.3, 1.4), noise=99.0))  # more noise than change
    assert step._lipschitz(1) == (0.0, pytest.approx(0.0, abs=1e-3))
    step.forget(0)
    assert step._lipschitz(1)[0] == pytest.approx(math.sqrt(0.25 - 2 * 0.05) / 5, rel=1e-5)


def test_a_change_of_sub_model_is_no_second_update():
    step = MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0), submodel=HALVES[0]))
    moved = update(MOVED, (9.0, 9.0), submodel=HALVES[1])
    assert commit(step, moved, relative=0.01) == FIRST_MOVEMENT / 0.01
    found = commit(step, update(HERE, (9.3, 9.4), submodel=HALVES[1]), gain=1e9)
    assert found == pytest.approx(SAFE / 0.1, rel=1e-5)


def test_sub_models_count_by_their_devices():
    """Squared changes of 0.09 by two devices of one and 0.01 by one of the other; all move by 5."""
    step = MeasuredStep()
    parts = [HALVES[0], HALVES[0], HALVES[1]]
    deltas = [(1.3, 1.0), (1.3, 1.0), (1.0, 1.1)]
    for moved in (False, True):
        base = MOVED if moved else HERE
        commit(
            step,
            *(
                update(base, delta if moved else (1.0, 1.0), device, weight=7.0, submodel=part)
                for device, (delta, part) in enumerate(zip(deltas, parts, strict=True))
            ),
        )
    expected = math.sqrt((2 * 0.09 + 0.01) / 3) / 5
    assert step._lipschitz(3) == pytest.approx((expected, 0.3 / 5), rel=1e-5)


def test_large_models_are_measured_on_the_same_coordinates_every_time():
    first, again = update([0.0] * 5000, [0.0] * 5000), update([1.0] * 5000, [0.5] * 5000)
    step = MeasuredStep()
    commit(step, first)
    assert commit(step, again, gain=1e9) == pytest.approx(SAFE / 0.5)
    (kept,) = step.state()["visits"].values()
    assert kept.base.numel() == kept.delta.numel() == COORDINATES


def test_a_restored_step_continues_bit_for_bit():
    step, again = MeasuredStep(), MeasuredStep()
    commit(step, update(HERE, (1.0, 1.0), staleness=3), members=4)
    commit(step, update(MOVED, (-1.0, 1.4)), members=4)
    again.restore(decode(*encode(step.state())))
    found = {commit(each, update(HERE, (0.7, 0.1)), members=4) for each in (step, again)}
    assert len(found) == 1
    assert again._lipschitz(4) == step._lipschitz(4)
    assert (again.gain, again.delay) == (step.gain, step.delay) != (FIRST_GAIN, 0.0)

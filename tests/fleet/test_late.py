"""Lateness in epochs, and the choice of late devices."""

import numpy as np
import pytest

from latecomer.errors import BadInput
from latecomer.fleet.late import GAMMA_SHAPE, Lateness, choose_late, lateness_from_epochs

COUNTS = np.array([[5, 0, 1], [0, 3, 0], [2, 3, 0], [0, 0, 9], [0, 0, 0]])


@pytest.mark.parametrize(
    ("delay", "extra"), [(40, 395.0), (1, 5.0), (0.5, 0.0), (0.25, 0.0), (0, 0.0), (2.5, 20.0)]
)
def test_a_constant_delay_lands_in_mid_epoch(delay: float, extra: float) -> None:
    how = lateness_from_epochs("in-flight", delay, epoch_seconds=10)
    assert how == Lateness("in-flight", extra)
    assert how.extra_seconds(gamma_draw=123.0) == extra


@pytest.mark.parametrize("delay", [1, 2, 40])
def test_staleness_on_a_uniform_fleet_is_the_delay(delay: int) -> None:
    # Sent at version 3 on a fleet that commits every 10 s; regular arrival on a border.
    arrives = 3 * 10 + 10 + lateness_from_epochs("busy", delay, epoch_seconds=10).extra_seconds(0.0)
    assert arrives // 10 - 3 == delay


def test_a_gamma_delay_has_its_mean_and_shape() -> None:
    how = lateness_from_epochs("busy", 10, epoch_seconds=7, gamma=True)
    assert how == Lateness("busy", 70, gamma=True)
    units = np.random.default_rng(0).standard_gamma(GAMMA_SHAPE, 20_000)
    extras = np.array([how.extra_seconds(unit) for unit in units.tolist()])
    assert extras.mean() == pytest.approx(70, rel=0.02)
    assert extras.std() == pytest.approx(70 / np.sqrt(2), rel=0.03)


def test_epochs_without_length_are_refused() -> None:
    with pytest.raises(BadInput, match="epochs take no time"):
        lateness_from_epochs("busy", 4, epoch_seconds=0)


@pytest.mark.parametrize(
    ("classes", "devices", "chosen"),
    [
        ([0], 1, (0,)),
        ([1], 1, (1,)),  # a tie of 3 with device 2: the lower id
        ([2], 2, (0, 3)),
        ([0, 1], 2, (0, 2)),
        ([1, 1], 3, (1, 2)),  # no other device holds class 1
        ([0, 1, 2], 5, (0, 1, 2, 3)),
        ([0], 0, ()),
    ],
)
def test_the_holders_of_max_examples_are_late(
    classes: list[int], devices: int, chosen: tuple[int, ...]
) -> None:
    assert choose_late(COUNTS, classes, devices, seed=1) == chosen


def test_without_classes_random_devices_with_data_are_late() -> None:
    assert choose_late(COUNTS, [], 9, seed=1) == (0, 1, 2, 3)
    many = np.ones((50, 2), dtype=np.int64)
    chosen = choose_late(many, [], 10, seed=1)
    assert len(set(chosen)) == 10
    assert chosen == tuple(sorted(chosen)) == choose_late(many, [], 10, seed=1)
    assert chosen != choose_late(many, [], 10, seed=2)

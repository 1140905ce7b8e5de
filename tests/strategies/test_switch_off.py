"""The switch that ends compensation: hand-worked errors, and the fade-out."""

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.strategies.parts.switch_off import SwitchOff, error


def test_the_error_is_the_mean_absolute_difference():
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])) == pytest.approx(1.5)


def test_privacy_noise_is_subtracted():
    """Differences of spread 3 under noise of spread 4 look like 5, and count as 3."""
    rng = torch.Generator().manual_seed(0)
    difference, noise = torch.randn(2, 200_000, generator=rng)
    zero = torch.zeros(200_000)
    plain = error(3 * difference, zero)
    assert error(3 * difference + 4 * noise, zero) == pytest.approx(plain * 5 / 3, rel=0.01)
    assert error(3 * difference + 4 * noise, zero, 16.0) == pytest.approx(plain, rel=0.02)
    assert error(4 * noise, zero, 17.0) == 0.0


def test_it_fades_out_over_a_tenth_of_the_commits_before():
    switch = SwitchOff(decay=0.1)
    switch.record("main", 0, 90, estimated=2.0, stale=1.0)
    assert switch.gamma("main", 100) == 1.0
    assert switch.decide("main", 100) == (2.0, 1.0)
    found = [switch.gamma("main", now) for now in (100, 105, 110, 500)]
    assert found == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert switch.decide("main", 120) is None  # once


def test_without_decay_it_ends_at_once():
    switch = SwitchOff(decay=0.0)
    switch.record("main", 0, 90, 2.0, 1.0)
    switch.decide("main", 100)
    assert switch.gamma("main", 100) == 0.0


def test_every_device_counts_once():
    """One device with a large error cannot end compensation for the others."""
    switch = SwitchOff()
    for device in range(9):
        switch.record("main", device, 10, 0.01, 0.05)
    switch.record("main", 9, 10, 600.0, 0.0)
    assert switch.decide("main", 10) is None
    for device in range(5):
        switch.record("main", device, 11, 0.07, 0.05)  # only the last validation counts
    assert switch.decide("main", 11) == pytest.approx((60.039, 0.045))


def test_half_of_the_devices_with_estimates_must_be_validated():
    switch = SwitchOff()
    for device in range(3):
        switch.used("main", device, 10)
    switch.used("other", 7, 10)  # devices of another lineage do not count
    switch.record("main", 0, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is None
    switch.record("main", 1, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is not None


def test_old_validations_and_absent_devices_are_ignored():
    switch = SwitchOff()
    for device in range(5):
        switch.used("main", device, 10)
        switch.record("main", device, 10, 0.1, 1.0)
    switch.record("main", 9, 95, 2.0, 1.0)
    assert switch.decide("main", 19) is None
    assert switch.decide("main", 100) == (2.0, 1.0)


def test_a_diverged_estimate_has_an_infinite_error():
    assert error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    switch = SwitchOff()
    switch.record("main", 0, 10, float("inf"), 1.0)
    assert switch.decide("main", 10) == (float("inf"), 1.0)


def test_it_can_be_disabled():
    switch = SwitchOff(enabled=False)
    switch.record("main", 0, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is None


def test_lineages_are_decided_separately():
    switch = SwitchOff(decay=0.0)
    switch.record("main", 0, 10, 3.0, 1.0)
    switch.decide("main", 10)
    switch.on_fork("main", "child")
    assert switch.gamma("child", 10) == 0.0
    assert switch.gamma("other", 10) == 1.0
    switch.record("other", 5, 10, 1.0, 2.0)
    switch.on_absorb("other", "main")
    assert switch.gamma("other", 10) == 1.0
    copy = SwitchOff(decay=0.0)
    copy.restore(switch.state())
    assert copy.gamma("child", 10) == 0.0


def test_far_staler_updates_are_exempt_until_they_are_validated():
    switch = SwitchOff(decay=0.0, exemption=2.0)
    for device, staleness in enumerate((10, 20, 30)):
        switch.record("main", device, 90, 2.0, 1.0, staleness)
    switch.used("main", 9, 90, 100)
    assert switch.decide("main", 100) == (2.0, 1.0)
    assert switch.ended_below("main") == 40.0  # twice the median staleness of the validated
    assert [switch.gamma("main", 100, staleness) for staleness in (20, 39, 40, 100)] == [0, 0, 1, 1]
    assert switch.decide("main", 110) is None  # results on less stale updates do not count
    switch.record("main", 9, 110, 1.0, 2.0, 100)
    assert switch.decide("main", 120) is None  # a good estimate
    switch.record("main", 9, 120, 2.0, 1.0, 100)
    assert switch.decide("main", 130) == (2.0, 1.0)
    assert switch.ended_below("main") == 200.0
    copy = SwitchOff(decay=0.0, exemption=2.0)
    copy.restore(decode(*encode(switch.state())))
    assert [copy.gamma("main", 130, staleness) for staleness in (100, 200)] == [0.0, 1.0]


def test_a_second_end_does_not_restart_the_first_fade_out():
    switch = SwitchOff(decay=1.0, exemption=2.0)
    switch.record("main", 0, 100, 2.0, 1.0, 10)
    switch.decide("main", 100)
    assert switch.gamma("main", 150, 10) == 0.5
    switch.record("main", 1, 150, 2.0, 1.0, 50)
    switch.decide("main", 150)
    assert switch.gamma("main", 150, 10) == 0.5  # nor does it end at once
    assert [switch.gamma("main", 225, staleness) for staleness in (10, 50, 100)] == [0.0, 0.5, 1.0]


def test_a_result_on_a_less_stale_update_does_not_replace_one_that_counts():
    switch = SwitchOff(decay=0.0, exemption=2.0)
    switch.record("main", 0, 100, 2.0, 1.0, 10)
    switch.decide("main", 100)
    switch.record("main", 1, 110, 2.0, 1.0, 50)
    switch.record("main", 1, 111, 1.0, 2.0, 10)  # its estimate was used before
    assert switch.decide("main", 111) == (2.0, 1.0)

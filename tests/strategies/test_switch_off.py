"""The switch: hand-worked errors and fading."""

import pytest
import torch

from latecomer.core.codec import decode, encode
from latecomer.strategies.parts.switch_off import SwitchOff, error


def test_the_error_is_the_mean_absolute_difference():
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])) == pytest.approx(1.5)


def test_public_noise_is_taken_out():
    """Differences of spread 3 under noise of spread 4 look like 5, and count as 3."""
    rng = torch.Generator().manual_seed(0)
    difference, noise = torch.randn(2, 200_000, generator=rng)
    truth = torch.zeros(200_000)
    plain = error(3 * difference, truth)
    assert error(3 * difference + 4 * noise, truth) == pytest.approx(plain * 5 / 3, rel=0.01)
    assert error(3 * difference + 4 * noise, truth, 16.0) == pytest.approx(plain, rel=0.02)
    assert error(4 * noise, truth, 17.0) == 0.0


def test_it_fades_out_over_a_tenth_of_the_time_before():
    switch = SwitchOff(decay=0.1)
    switch.judge("main", 0, 90, estimated=2.0, stale=1.0)
    assert switch.gamma("main", 100) == 1.0
    assert switch.decide("main", 100) == (2.0, 1.0)
    found = [switch.gamma("main", now) for now in (100, 105, 110, 500)]
    assert found == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert switch.decide("main", 120) is None  # once


def test_without_decay_it_ends_at_once():
    switch = SwitchOff(decay=0.0)
    switch.judge("main", 0, 90, 2.0, 1.0)
    switch.decide("main", 100)
    assert switch.gamma("main", 100) == 0.0


def test_every_device_has_one_vote():
    """One device that is far off cannot end it for the others, however large its updates."""
    switch = SwitchOff()
    for device in range(9):
        switch.judge("main", device, 10, 0.01, 0.05)
    switch.judge("main", 9, 10, 600.0, 0.0)
    assert switch.decide("main", 10) is None
    for device in range(5):
        switch.judge("main", device, 11, 0.07, 0.05)  # only the last judgement counts
    assert switch.decide("main", 11) == pytest.approx((60.039, 0.045))


def test_half_of_those_on_trial_must_have_been_judged():
    switch = SwitchOff()
    for device in range(3):
        switch.tried("main", device, 10)
    switch.tried("other", 7, 10)  # another lineage's devices have no say
    switch.judge("main", 0, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is None
    switch.judge("main", 1, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is not None


def test_old_judgements_and_devices_that_have_vanished_are_forgotten():
    switch = SwitchOff()
    for device in range(5):
        switch.tried("main", device, 10)
        switch.judge("main", device, 10, 0.1, 1.0)
    switch.judge("main", 9, 95, 2.0, 1.0)
    assert switch.decide("main", 19) is None
    assert switch.decide("main", 100) == (2.0, 1.0)


def test_an_estimate_that_diverged_is_the_worst():
    assert error(torch.tensor([float("nan")]), torch.zeros(1)) == float("inf")
    switch = SwitchOff()
    switch.judge("main", 0, 10, float("inf"), 1.0)
    assert switch.decide("main", 10) == (float("inf"), 1.0)


def test_it_can_be_left_on():
    switch = SwitchOff(enabled=False)
    switch.judge("main", 0, 10, 3.0, 1.0)
    assert switch.decide("main", 10) is None


def test_lineages_have_switches_of_their_own():
    switch = SwitchOff(decay=0.0)
    switch.judge("main", 0, 10, 3.0, 1.0)
    switch.decide("main", 10)
    switch.on_fork("main", "child")
    assert switch.gamma("child", 10) == 0.0
    assert switch.gamma("other", 10) == 1.0
    switch.judge("other", 5, 10, 1.0, 2.0)
    switch.on_absorb("other", "main")
    assert switch.gamma("other", 10) == 1.0
    copy = SwitchOff(decay=0.0)
    copy.restore(switch.state())
    assert copy.gamma("child", 10) == 0.0


def test_who_is_far_later_is_spared_until_it_is_judged():
    switch = SwitchOff(decay=0.0, spare=2.0)
    for device, staleness in enumerate((10, 20, 30)):
        switch.judge("main", device, 90, 2.0, 1.0, staleness)
    switch.tried("main", 9, 90, 100)
    assert switch.decide("main", 100) == (2.0, 1.0)
    assert switch.ended_below("main") == 40.0  # twice the usual of those who were judged
    assert [switch.gamma("main", 100, staleness) for staleness in (20, 39, 40, 100)] == [0, 0, 1, 1]
    assert switch.decide("main", 110) is None  # those who were judged have no say in the rest
    switch.judge("main", 9, 110, 1.0, 2.0, 100)
    assert switch.decide("main", 120) is None  # a good estimate
    switch.judge("main", 9, 120, 2.0, 1.0, 100)
    assert switch.decide("main", 130) == (2.0, 1.0)
    assert switch.ended_below("main") == 200.0
    copy = SwitchOff(decay=0.0, spare=2.0)
    copy.restore(decode(*encode(switch.state())))
    assert [copy.gamma("main", 130, staleness) for staleness in (100, 200)] == [0.0, 1.0]


def test_what_had_ended_does_not_begin_to_fade_anew():
    switch = SwitchOff(decay=1.0, spare=2.0)
    switch.judge("main", 0, 100, 2.0, 1.0, 10)
    switch.decide("main", 100)
    assert switch.gamma("main", 150, 10) == 0.5
    switch.judge("main", 1, 150, 2.0, 1.0, 50)
    switch.decide("main", 150)
    assert switch.gamma("main", 150, 10) == 0.5  # nor does it end at once
    assert [switch.gamma("main", 225, staleness) for staleness in (10, 50, 100)] == [0.0, 0.5, 1.0]


def test_an_old_probe_of_the_judged_does_not_silence_a_vote():
    switch = SwitchOff(decay=0.0, spare=2.0)
    switch.judge("main", 0, 100, 2.0, 1.0, 10)
    switch.decide("main", 100)
    switch.judge("main", 1, 110, 2.0, 1.0, 50)
    switch.judge("main", 1, 111, 1.0, 2.0, 10)  # was waiting since before
    assert switch.decide("main", 111) == (2.0, 1.0)

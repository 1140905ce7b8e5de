"""The switch: hand-worked errors and fading."""

import pytest
import torch

from latecomer.strategies.switching import Switch, error


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
    switch = Switch(decay=0.1)
    switch.judge("main", 0, estimated=2.0, stale=1.0)
    assert switch.gamma("main", 100) == 1.0
    assert switch.decide("main", 100, repaired=1) == (2.0, 1.0)
    found = [switch.gamma("main", now) for now in (100, 105, 110, 500)]
    assert found == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert switch.decide("main", 120, repaired=1) is None  # once


def test_without_decay_it_ends_at_once():
    switch = Switch(decay=0.0)
    switch.judge("main", 0, 2.0, 1.0)
    switch.decide("main", 100, 1)
    assert switch.gamma("main", 100) == 0.0


def test_the_mean_over_devices_decides():
    switch = Switch()
    switch.judge("main", 0, 3.0, 1.0)
    switch.judge("main", 1, 1.0, 4.0)
    assert switch.decide("main", 10, 2) is None
    switch.judge("main", 1, 1.0, 2.0)  # only its last judgement counts
    assert switch.decide("main", 11, 2) == (2.0, 1.5)


def test_half_of_the_repaired_must_have_been_judged():
    switch = Switch()
    switch.judge("main", 0, 3.0, 1.0)
    assert switch.decide("main", 10, repaired=3) is None
    assert switch.decide("main", 10, repaired=2) is not None


def test_it_can_be_left_on():
    switch = Switch(enabled=False)
    switch.judge("main", 0, 3.0, 1.0)
    assert switch.decide("main", 10, 1) is None


def test_lineages_have_switches_of_their_own():
    switch = Switch(decay=0.0)
    switch.judge("main", 0, 3.0, 1.0)
    switch.decide("main", 10, 1)
    switch.on_fork("main", "child")
    assert switch.gamma("child", 10) == 0.0
    assert switch.gamma("other", 10) == 1.0
    switch.judge("other", 5, 1.0, 2.0)
    switch.on_absorb("other", "main")
    assert switch.gamma("other", 10) == 1.0
    copy = Switch(decay=0.0)
    copy.restore(switch.state())
    assert copy.gamma("child", 10) == 0.0

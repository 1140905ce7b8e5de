"""Fleet presets: shares and parameters of their devices; equal for equal seeds."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latecomer.fleet.phones import CLASSES, DAY, LINKS, phones
from latecomer.fleet.presets import PROFILES, gamma, tiers, uniform
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.submodel_widths import apportion

TIER_NAMES = ("fast", "medium-fast", "medium-slow", "slow")


@pytest.mark.parametrize(
    ("devices", "counts"),
    [
        (10, (3, 3, 2, 2)),
        (7, (2, 2, 2, 1)),  # 2.1, 2.1, 1.4, 1.4: the one left goes to the first of the 0.4
        (100, (30, 30, 20, 20)),
        (1, (1, 0, 0, 0)),
    ],
)
def test_tiers_have_exact_counts(devices: int, counts: tuple[int, ...]) -> None:
    found = Counter(profile.group for profile in tiers(devices, seed=1))
    assert tuple(found[name] for name in TIER_NAMES) == counts


def test_each_tier_is_half_as_fast_as_the_one_before() -> None:
    by_name = {profile.group: profile for profile in tiers(10, seed=1)}
    seconds = [by_name[name].compute_seconds(50) for name in TIER_NAMES]
    assert seconds == [1.5, 3.0, 6.0, 12.0]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 500), st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_parts_add_up_and_are_within_one_of_the_share(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1


def test_a_uniform_task_takes_ten_seconds_for_any_data() -> None:
    assert uniform(3) == (DeviceProfile(seconds_per_task=10),) * 3
    assert uniform(1)[0].compute_seconds(12345) == 10


def test_gamma_speeds_have_their_mean_and_shape() -> None:
    seconds = np.array([profile.seconds_per_example for profile in gamma(20_000, seed=1)])
    assert seconds.mean() == pytest.approx(0.1, rel=0.02)
    assert seconds.std() == pytest.approx(0.1 / np.sqrt(2), rel=0.03)


def test_phones_are_mixed_as_documented() -> None:
    fleet = phones(1000, seed=1)
    found = Counter(profile.group for profile in fleet)
    assert found == {kind.name: kind.percent * 10 for kind in CLASSES}
    assert {(p.down, p.up, p.latency) for p in fleet} == {(k.down, k.up, k.latency) for k in LINKS}
    for kind in CLASSES:
        members = [profile for profile in fleet if profile.group == kind.name]
        at_night = np.mean([bool(profile.windows) for profile in members])
        assert at_night == pytest.approx(kind.night, abs=0.15)
        median = np.median([profile.seconds_per_example for profile in members])
        assert median == pytest.approx(kind.seconds_per_example, rel=0.15)
    nights = [profile.windows[0] for profile in fleet if profile.windows]
    assert all(6 * 3600 <= end - start <= 9 * 3600 for start, end in nights)
    assert any(end > DAY for _, end in nights)


def test_shares_and_probabilities_of_the_classes_add_up() -> None:
    assert sum(kind.percent for kind in CLASSES) == 100
    assert all(sum(kind.links) == pytest.approx(1) for kind in CLASSES)


@pytest.mark.parametrize("name", ["tiers", "gamma", "phones"])
def test_a_seed_fixes_the_fleet(name: str) -> None:
    build = PROFILES[name].build
    assert build(30, 1, "") == build(30, 1, "")
    assert build(30, 1, "") != build(30, 2, "")
    assert len(build(30, 1, "")[0]) == 30


def test_every_preset_has_its_name_and_a_line() -> None:
    assert list(PROFILES) == ["uniform", "tiers", "gamma", "phones", "trace"]
    for name, preset in PROFILES.items():
        assert preset.name == name
        assert preset.summary
        assert "\n" not in preset.summary

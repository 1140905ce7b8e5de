"""The device profile: its sums and its validation."""

from math import inf, nan
from typing import Any

import pytest

from latecomer.errors import BadInput
from latecomer.fleet.profile import DeviceProfile


def test_the_defaults_are_an_ideal_device() -> None:
    profile = DeviceProfile()
    assert profile.download_seconds(10**9) == 0
    assert profile.compute_seconds(10**6) == 0
    assert profile.upload_seconds(10**9) == 0


def test_costs_add_up() -> None:
    profile = DeviceProfile(
        seconds_per_example=0.5, seconds_per_task=2, down=1000, up=250, latency=0.25
    )
    assert profile.download_seconds(4000) == 4.25
    assert profile.compute_seconds(6) == 5.0
    assert profile.upload_seconds(4000) == 16.25


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("seconds_per_example", -0.1, "0 or more"),
        ("seconds_per_task", inf, "finite"),
        ("down", 0, "above 0"),
        ("up", -5, "above 0"),
        ("up", nan, "above 0"),
        ("latency", nan, "0 or more"),
        ("jitter", -1, "0 to 10"),
        ("jitter", 11, "0 to 10"),
        ("period", 0, "above 0"),
        ("dropout", 1.5, "0 to 1"),
        ("crash", -0.5, "0 to 1"),
        ("restart_seconds", -1, "0 or more"),
        ("detect_seconds", inf, "finite"),
    ],
)
def test_a_bad_field_is_named_with_its_value(field: str, value: float, allowed: str) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(BadInput) as caught:
        DeviceProfile(**fields)
    message = str(caught.value)
    assert message.startswith(f"{field} = {value}: ")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize("window", [(-1, 5), (100, 120), (5, 5), (7, 3), (50, 151), (0, inf)])
def test_a_bad_window_is_refused(window: tuple[float, float]) -> None:
    with pytest.raises(BadInput, match=r"window_(start|end) = "):
        DeviceProfile(windows=(window,), period=100)


def test_a_window_may_run_into_the_next_period() -> None:
    assert DeviceProfile(windows=((90, 110),), period=100).windows == ((90, 110),)

"""The fleet: presets, overrides, lateness and the nominal epoch."""

from math import inf
from pathlib import Path

import pytest

from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet, epoch_seconds, make_fleet, with_lateness
from latecomer.fleet.late import Lateness, lateness_from_epochs
from latecomer.fleet.presets import tiers
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.task_times import TaskTimes


def test_a_late_device_of_a_uniform_fleet() -> None:
    fleet = make_fleet("uniform", 3)
    nominal = epoch_seconds(fleet.devices, [5, 5, 5], 1000)
    fleet = with_lateness(fleet, (1,), lateness_from_epochs("in-flight", 40, nominal))
    assert fleet.task_times(0, 7, 20.0, 5, 1000, 1000) == TaskTimes(
        20.0, 20.0, 30.0, 30.0, 30.0, uploaded=30.0
    )
    assert fleet.task_times(1, 7, 20.0, 5, 1000, 1000) == TaskTimes(
        20.0, 20.0, 30.0, 425.0, 30.0, uploaded=30.0
    )


def test_task_times_depend_on_seed_device_and_number_only() -> None:
    fleet = make_fleet("phones", 20, seed=3)
    tasks = [(device, number) for device in range(20) for number in range(5)]
    ahead = {task: fleet.task_times(*task, 0.0, 50, 10_000, 10_000) for task in tasks}
    back = {task: fleet.task_times(*task, 0.0, 50, 10_000, 10_000) for task in reversed(tasks)}
    assert ahead == back
    other = Fleet(fleet.devices, seed=4)
    assert other.task_times(0, 0, 0.0, 50, 10_000, 10_000) != ahead[0, 0]


def test_lateness_adds_up_over_calls() -> None:
    low, high = Lateness("busy", 20), Lateness("busy", 100)
    fleet = with_lateness(make_fleet("uniform", 4), (0, 1), low)
    both = with_lateness(fleet, (1, 3), high)
    assert dict(fleet.late) == {0: low, 1: low}
    assert dict(both.late) == {0: low, 1: high, 3: high}


def test_opening_and_closing_of_a_device() -> None:
    fleet = Fleet((DeviceProfile(windows=((10, 20),), period=100), DeviceProfile()))
    assert fleet.next_open(0, 50) == 110
    assert fleet.close_after(0, 115) == 120
    assert fleet.next_open(1, 50) == 50
    assert fleet.close_after(1, 50) == inf
    assert fleet.has_windows(0)
    assert not fleet.has_windows(1)
    assert not Fleet((DeviceProfile(windows=((0, 9), (9, 20)), period=20),)).has_windows(0)
    assert fleet.longest_period == 86400


def test_the_nominal_epoch_is_the_quorum_quantile() -> None:
    profiles = [DeviceProfile(seconds_per_task=seconds) for seconds in range(1, 11)]
    assert epoch_seconds(profiles, [1] * 10, 0) == 7
    # Devices without data are not counted: 3..10 remain, and the sixth of these eight is 8.
    assert epoch_seconds(profiles, [0, 0] + [1] * 8, 0) == 8


def test_the_nominal_epoch_ignores_jitter_faults_and_windows() -> None:
    profile = DeviceProfile(
        seconds_per_example=0.5,
        down=1000,
        up=500,
        latency=1,
        jitter=1,
        windows=((50, 60),),
        crash=0.5,
        dropout=0.5,
    )
    # 1 + 2 down, 3 of compute, 1 + 4 up
    assert epoch_seconds([profile], [6], 2000) == 11


def test_a_fleet_without_data_has_no_epoch() -> None:
    with pytest.raises(BadInput, match="no device has any data"):
        epoch_seconds([DeviceProfile()], [0], 0)


def test_overrides_hold_for_all_devices_and_none_keeps() -> None:
    fleet = make_fleet("tiers", 10, seed=1, overrides={"crash": 0.5, "up": 9.0, "latency": None})
    plain = tiers(10, seed=1)
    assert all(device.crash == 0.5 and device.up == 9 for device in fleet.devices)
    assert [device.latency for device in fleet.devices] == [device.latency for device in plain]
    assert [device.group for device in fleet.devices] == [device.group for device in plain]
    assert make_fleet("tiers", 10, seed=1).devices == plain


@pytest.mark.parametrize(("devices", "order"), [(2, [0, 1]), (5, [0, 1, 2, 0, 1]), (3, [0, 1, 2])])
def test_a_trace_is_repeated_or_cut(tmp_path: Path, devices: int, order: list[int]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("device,group\n0,0\n1,1\n2,2\n", encoding="utf-8")
    fleet = make_fleet("trace", devices, str(path))
    assert [int(device.group) for device in fleet.devices] == order
    assert len(fleet.notes) == (devices != 3)
    assert all(f"holds 3 devices, fleet.devices is {devices}:" in note for note in fleet.notes)


@pytest.mark.parametrize(
    ("profile", "devices", "overrides", "words"),
    [
        ("tier", 3, {}, "fleet.profile 'tier' is unknown; did you mean 'tiers'? (allowed: uniform"),
        ("xyz", 3, {}, "fleet.profile 'xyz' is unknown (allowed: uniform, tiers, gamma, phones"),
        ("uniform", 3, {"dropout": 2.0}, "fleet.dropout = 2.0: allowed is 0 to 1"),
        ("trace", 3, {}, "fleet.path = ''"),
    ],
)
def test_a_bad_fleet_is_refused(
    profile: str, devices: int, overrides: dict[str, float | None], words: str
) -> None:
    with pytest.raises(BadInput) as caught:
        make_fleet(profile, devices, overrides=overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

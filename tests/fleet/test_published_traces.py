"""Traces in the layouts of FedScale and FLASH: hand-worked profiles, wrong files, a large fleet."""

import json
from math import inf
from pathlib import Path

import pytest

from latecomer.errors import BadInput
from latecomer.fleet.fleet import make_fleet
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.trace import read_trace

CAPACITY = {
    2: {"computation": 100.0, "communication": 8000.0},
    10: {"computation": 20, "communication": 1600},
    1: {"computation": 50.0, "communication": 80.0},
}
ACTIVE = {
    7: {
        "duration": 60,
        "active": [10, 50],
        "inactive": [30, 90],
        "finish_time": 100,
        "model": "A1",
    },
    3: {"active": [70], "inactive": [], "finish_time": 80, "model": "B2"},
    9: {"active": [5], "inactive": [5], "finish_time": 80, "model": "never"},
}
LOG = "\n".join(
    f"2020-01-02 {time}\t{state}"
    for time, state in [
        ("00:00:00", "screen_lock"),
        ("00:00:10", "Wifi"),
        ("00:00:20", "battery_charged_on"),  # all three: opens at 20
        ("00:00:30", "57.0%"),
        ("00:00:50", "4G"),  # closes at 50
        ("00:01:00", "wifi"),  # opens at 60
        ("00:01:05", "screen_unlock"),  # closes at 65
        ("00:02:00", "battery_charged_off"),
    ]
)


def fedscale(folder: Path, capacity: object = CAPACITY, active: object = ACTIVE) -> str:
    for name, table in (("client_device_capacity", capacity), ("client_behave_trace", active)):
        if table is not None:
            (folder / f"{name}.json").write_text(json.dumps(table))
    return str(folder)


def flash(folder: Path, users: object, links: object = None) -> str:
    (folder / "user_behavior_tiny.json").write_text(json.dumps(users))
    if links is not None:
        (folder / "speed_distri.json").write_text(json.dumps(links))
    return str(folder)


def test_fedscale_profiles_by_hand(tmp_path: Path) -> None:
    """3 x 50 ms of inference is 0.15 s; 80 kbit/s are 10,000 bytes/s; traces repeat in order."""
    b2 = {"windows": ((70.0, 80.0),), "period": 80.0, "group": "B2"}
    a1 = {"windows": ((10.0, 30.0), (50.0, 90.0)), "period": 100.0, "group": "A1"}
    profiles, notes = read_trace(fedscale(tmp_path))
    assert profiles == (
        DeviceProfile(seconds_per_example=0.15, down=1e4, up=1e4, **b2),  # type: ignore[arg-type]
        DeviceProfile(seconds_per_example=0.3, down=1e6, up=1e6, **a1),  # type: ignore[arg-type]
        DeviceProfile(seconds_per_example=0.06, down=2e5, up=2e5, **b2),  # type: ignore[arg-type]
    )
    assert notes == (f"{tmp_path}: 1 traces left out, whose phone is never active",)


def test_fedscale_without_availability(tmp_path: Path) -> None:
    profiles = read_trace(fedscale(tmp_path, active=None))[0]
    assert [profile.windows for profile in profiles] == [(), (), ()]


def test_flash_windows_by_hand(tmp_path: Path) -> None:
    users = {
        "u": {"guid": "u", "model": "CPH1801", "messages": LOG},
        "idle": {"guid": "idle", "model": "X", "messages": "2020-01-02 00:00:00\twifi"},
    }
    links = {"v": {"down_u": 100.0, "down_sigma": 5.0, "up_u": 50.0, "up_sigma": 5.0}}
    profiles, notes = read_trace(flash(tmp_path, users, links))
    assert profiles == (
        DeviceProfile(
            down=102400.0,
            up=51200.0,
            windows=((20.0, 50.0), (60.0, 65.0)),
            period=120.0,
            group="CPH1801",
        ),
    )
    assert len(notes) == 1
    assert "1 traces left out" in notes[0]
    (tmp_path / "speed_distri.json").unlink()
    assert read_trace(str(tmp_path))[0][0].down == inf


@pytest.mark.parametrize(
    ("capacity", "active", "said"),
    [
        ({1: {"computation": "fast", "communication": 1}}, None, "computation = 'fast'"),
        ({1: {"computation": 1, "communication": 0}}, None, "down = 0.0"),
        ({1: {"computation": -1, "communication": 1}}, None, "computation = -1"),
        ({1: {"communication": 1}}, None, "computation = None"),
        ({1: 5}, None, "a table of fields"),
        ([1], None, "one entry per client"),
        ({}, None, "one entry per client"),
        (CAPACITY, {1: {**ACTIVE[7], "active": [1]}}, "1 values in 'active', 2 in 'inactive'"),
        (CAPACITY, {1: {**ACTIVE[7], "active": 3}}, "a list of seconds"),
        (CAPACITY, {1: {**ACTIVE[7], "finish_time": float("nan")}}, "finish_time = nan"),
        (CAPACITY, {9: ACTIVE[9]}, "no client is ever active"),
    ],
)
def test_wrong_fedscale_files(tmp_path: Path, capacity: object, active: object, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_trace(fedscale(tmp_path, capacity, active))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("yesterday\twifi", "allowed is YYYY-MM-DD"),
        ("2020-01-02 00:00:00 wifi", "allowed is YYYY-MM-DD"),
        ("2020-01-02 00:00:09\twifi\n2020-01-02 00:00:01\twifi", "earlier than the line before"),
        ("", "no user is ever locked"),
    ],
)
def test_wrong_flash_files(tmp_path: Path, messages: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_trace(flash(tmp_path, {"u": {"messages": messages}}))
    assert said in str(caught.value)


def test_a_folder_without_a_known_file_and_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="client_device_capacity"):
        read_trace(str(tmp_path))
    (tmp_path / "client_device_capacity.json").write_bytes(b"\x80\x05damaged")
    with pytest.raises(BadInput, match="is not JSON"):
        read_trace(str(tmp_path))


def test_ten_thousand_devices(tmp_path: Path) -> None:
    capacity = {
        client: {"computation": 10 + client % 90, "communication": 1000 + client}
        for client in range(10_000)
    }
    fleet = make_fleet("trace", 10_000, fedscale(tmp_path, capacity), seed=1)
    assert len(fleet.devices) == 10_000
    assert fleet.devices[9_999].down == (1000 + 9_999) * 125
    assert fleet.next_open(1, 0.0) == 10.0

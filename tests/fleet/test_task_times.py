"""Task times: hand-worked values, losses, and random draws that do not depend on the profile."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from latecomer.fleet.late import Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.fleet.task_times import TaskTimes, task_time_rng, task_times

SLOW = DeviceProfile(seconds_per_example=0.5, seconds_per_task=2, down=1000, up=250, latency=0.25)
DONE = 125.5


def go(profile: DeviceProfile, lateness: Lateness | None = None, number: int = 0) -> TaskTimes:
    return task_times(profile, lateness, task_time_rng(1, 0, number), 100.0, 6, 4000, 4000)


def test_download_compute_and_upload_add_up() -> None:
    # 100 + (0.25 + 4) = 104.25; + (2 + 0.5 * 6) = 109.25; + (0.25 + 16) = 125.5
    assert go(SLOW) == TaskTimes(100.0, 104.25, 109.25, arrives=DONE, free=DONE, uploaded=DONE)


def test_an_upload_in_flight_leaves_the_device_free() -> None:
    assert go(SLOW, Lateness("in-flight", 395)) == TaskTimes(
        100.0, 104.25, 109.25, arrives=DONE + 395, free=DONE, uploaded=DONE
    )


def test_a_busy_device_is_free_when_its_upload_arrives() -> None:
    assert go(SLOW, Lateness("busy", 395)) == TaskTimes(
        100.0, 104.25, 109.25, arrives=DONE + 395, free=DONE + 395, uploaded=DONE
    )


def test_work_pauses_while_unreachable() -> None:
    # Reachable in [0, 7) of every 50 s: the download takes 100..104.25, training has 2.75 s until
    # 107 and 2.25 s from 150, the upload 4.75 s until 157, 7 s until 207 and 4.5 s from 250.
    profile = replace(SLOW, windows=((0, 7),), period=50)
    assert go(profile) == TaskTimes(
        100.0, 104.25, 152.25, arrives=254.5, free=254.5, uploaded=254.5
    )


def test_a_task_waits_for_the_window_even_on_an_ideal_link() -> None:
    profile = DeviceProfile(windows=((30, 40),), period=50)
    assert go(profile) == TaskTimes(100.0, 130.0, 130.0, arrives=130.0, free=130.0, uploaded=130.0)


def test_jitter_has_mean_one_and_touches_compute_only() -> None:
    jittery = replace(SLOW, jitter=0.4)
    moments = [go(jittery, number=number) for number in range(4000)]
    compute = np.array([moment.trained - moment.downloaded for moment in moments])
    assert compute.mean() == pytest.approx(5.0, rel=0.03)
    assert np.log(compute).std() == pytest.approx(0.4, rel=0.05)
    assert all(moment.downloaded == 104.25 for moment in moments)


def test_a_device_that_drops_out_never_comes_back() -> None:
    lost = go(replace(SLOW, dropout=1, detect_seconds=30))
    assert lost.arrives is None
    assert lost.free is None
    assert lost.lost is not None
    assert 100 <= lost.lost < DONE
    assert lost.reported == lost.lost + 30


@pytest.mark.parametrize(("restart", "detect", "away"), [(200, 30, 200), (5, 30, 30)])
def test_a_crashed_device_comes_back(restart: float, detect: float, away: float) -> None:
    lost = go(replace(SLOW, crash=1, restart_seconds=restart, detect_seconds=detect))
    assert lost.arrives is None
    assert lost.lost is not None
    assert lost.reported == lost.lost + detect
    assert lost.free == lost.lost + away


def test_a_crashed_device_comes_back_in_its_window() -> None:
    lost = go(replace(SLOW, crash=1, windows=((0, 20),), period=1000), number=3)
    assert lost.lost is not None
    assert lost.free is not None
    assert lost.free >= lost.lost + 60
    assert lost.free % 1000 == 0


def test_losses_come_at_their_rate_and_at_any_moment() -> None:
    fates = [go(replace(SLOW, dropout=0.1, crash=0.2), number=number) for number in range(4000)]
    vanished = sum(fate.free is None for fate in fates) / 4000
    crashed = sum(fate.lost is not None and fate.free is not None for fate in fates) / 4000
    assert vanished == pytest.approx(0.1, abs=0.02)
    assert crashed == pytest.approx(0.9 * 0.2, abs=0.02)
    fractions = [(fate.lost - 100) / (DONE - 100) for fate in fates if fate.lost is not None]
    assert np.mean(fractions) == pytest.approx(0.5, abs=0.03)


def test_gamma_lateness_is_drawn_per_task() -> None:
    lateness = Lateness("in-flight", 70, gamma=True)
    extras = [(go(SLOW, lateness, number).arrives or 0) - DONE for number in range(5000)]
    assert np.mean(extras) == pytest.approx(70, rel=0.04)
    assert len(set(extras)) == 5000


def test_the_same_numbers_are_drawn_for_any_parameters() -> None:
    states = set()
    for jitter, dropout, crash, windows in product((0, 0.3), (0, 1), (0, 1), ((), ((0, 7),))):
        profile = replace(SLOW, jitter=jitter, dropout=dropout, crash=crash, windows=windows)
        for lateness in (None, Lateness("busy", 9), Lateness("in-flight", 9, gamma=True)):
            rng = task_time_rng(1, 2, 3)
            task_times(profile, lateness, rng, 0.0, 5, 10, 10)
            states.add(rng.random())
    assert len(states) == 1


def test_one_feature_does_not_change_another() -> None:
    jittery = replace(SLOW, jitter=0.4)
    lateness = Lateness("in-flight", 70, gamma=True)
    for number in range(50):
        plain = go(jittery, number=number)
        late = go(replace(jittery, crash=0.3), lateness, number)
        assert late.trained == plain.trained
        if late.arrives is not None:
            assert late.free == plain.arrives


def test_a_tasks_stream_depends_on_seed_device_and_number_only() -> None:
    assert task_time_rng(1, 2, 3).random() == task_time_rng(1, 2, 3).random()
    places = [(1, 2, 3), (2, 2, 3), (1, 3, 2), (1, 2, 4), (1, 3, 3)]
    assert len({task_time_rng(*place).random() for place in places}) == len(places)

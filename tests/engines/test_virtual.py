"""The virtual engine on the toy problem, with times worked out by hand."""

from dataclasses import replace

import pytest

from latecomer.engines.virtual import ServerCosts
from latecomer.fleet.fleet import Fleet, with_lateness
from latecomer.fleet.late import lateness_from_epochs
from latecomer.fleet.profile import DeviceProfile
from toy import EXAMPLES, ToyRun, toy_fleet, toy_run, toy_server


def test_fast_devices_are_heard_more_often():
    run = toy_run("fedasync", updates=13)
    times = [(time, fields["device"]) for time, fields in run.lines("arrival")]
    # Device 0 needs 1 s, device 1 needs 2 s, ...: ties in the order they were sent.
    assert times[:8] == [(1, 0), (2, 1), (2, 0), (3, 2), (3, 0), (4, 3), (4, 1), (4, 0)]


def test_links_and_examples_add_up():
    profile = DeviceProfile(
        seconds_per_example=0.5, seconds_per_task=1, down=24, up=12, latency=0.25
    )
    run = ToyRun(toy_server("fedasync"), Fleet((profile,), seed=0))
    run.until(1)
    # 24 bytes of model: 0.25 + 24/24 down, 1 + 0.5 * 10 training, 0.25 + 24/12 up.
    assert run.engine.now == pytest.approx(1.25 + 1 + 0.5 * EXAMPLES + 2.25)
    assert (run.engine.bytes_down, run.engine.bytes_up) == (48, 24)
    ((_, told),) = run.lines("arrival")
    assert told["spans"] == (1.25, 6.0, 2.25)


def test_what_is_late_is_no_part_of_the_upload():
    for kind in ("in-flight", "busy"):
        fleet = with_lateness(toy_fleet(2), [1], lateness_from_epochs(kind, 4, 1.0))
        run = ToyRun(toy_server("fedasync"), fleet)
        run.until(8)
        late = [(time, f["spans"]) for time, f in run.lines("arrival") if f["device"] == 1]
        assert late[0] == (2 + 3.5, (0.0, 2.0, 0.0))


def test_stop_conditions():
    assert toy_run("fedasync", updates=7).server.accepted == 7
    run = ToyRun(toy_server("fedasync"), toy_fleet())
    assert run.until(virtual_seconds=3.5) == "virtual_seconds"
    assert run.engine.now == 3.0
    run = ToyRun(toy_server("fedavg"), toy_fleet())
    assert run.until(epochs=3) == "epochs"
    assert run.engine.now == 15.0


def test_training_happens_only_for_results_that_arrive():
    run = toy_run("fedasync", updates=10)
    arrived = [fields["task"] for _, fields in run.lines("arrival")]
    assert run.trainer.asked == arrived
    assert len(run.server.open_tasks) == 5


def test_a_lost_task_is_never_trained_and_the_others_go_on():
    fleet = toy_fleet(3, crash=0.3, restart_seconds=5, detect_seconds=2)
    run = ToyRun(toy_server("fedasync"), fleet)
    run.until(30)
    lost = {fields["task"] for _, fields in run.lines("drop")}
    assert lost
    assert not lost & set(run.trainer.asked)
    assert {f["device"] for _, f in run.lines("arrival")} == {0, 1, 2}


def test_the_run_ends_when_all_devices_are_gone():
    run = ToyRun(toy_server("fedasync"), toy_fleet(3, dropout=0.5))
    assert run.until(10_000) == "no events are left: all devices are lost or idle"
    assert run.server.accepted < 100
    assert not run.server.open_tasks


def test_vanished_devices_do_not_come_back_with_their_window():
    window = ((0.0, 50.0),)
    fleet = toy_fleet(2)
    fleet = replace(
        fleet,
        devices=tuple(replace(d, windows=window, period=100.0, dropout=1.0) for d in fleet.devices),
    )
    run = ToyRun(toy_server("fedasync"), fleet)
    run.until(virtual_seconds=10_000)
    assert len(run.lines("dispatch")) == 2


def test_work_pauses_while_the_window_is_closed():
    profile = DeviceProfile(seconds_per_task=4, windows=((0.0, 10.0),), period=100.0)
    run = ToyRun(toy_server("fedasync"), Fleet((profile,), seed=0))
    run.until(4)
    # 4, 8, then two seconds before the window closes and two after it opens again.
    assert [time for time, _ in run.lines("arrival")] == [4, 8, 102, 106]


def test_an_idle_device_gets_no_task_outside_its_window():
    closed_first = DeviceProfile(seconds_per_task=1, windows=((50.0, 60.0),), period=100.0)
    run = ToyRun(toy_server("fedasync"), Fleet((closed_first,), seed=0))
    run.until(12)
    times = [time for time, _ in run.lines("dispatch")]
    assert times[0] == 50
    assert all(50 <= time % 100 <= 60 for time in times)


def test_a_fleet_that_gets_no_tasks_does_not_run_for_ever():
    profile = DeviceProfile(seconds_per_task=1, windows=((0.0, 10.0),), period=100.0)
    run = ToyRun(toy_server("fedavg", {"min_devices": 5}), Fleet((profile,) * 3, seed=0))
    assert "no task is open" in run.until(10)


@pytest.mark.parametrize(("kind", "uploads"), [("in-flight", 20), ("busy", 4)])
def test_late_uploads_arrive_late_by_epochs(kind, uploads):
    """Uniform fleet of 10 s tasks; device 0 is late by 5 epochs."""
    fleet = Fleet((DeviceProfile(seconds_per_task=10),) * 5, seed=0)
    fleet = with_lateness(fleet, [0], lateness_from_epochs(kind, 5, 10.0))
    run = ToyRun(toy_server("semi-async"), fleet)
    run.until(epochs=25)
    late = [f["staleness"] for _, f in run.lines("arrival") if f["device"] == 0]
    others = {f["staleness"] for _, f in run.lines("arrival") if f["device"] != 0}
    assert others == {0}
    assert set(late) == {5}
    assert len(late) == uploads
    assert run.engine.now == 250.0


def test_a_busy_server_makes_everybody_wait():
    fleet = Fleet((DeviceProfile(seconds_per_task=1),) * 2, seed=0)
    run = ToyRun(toy_server("fedasync"), fleet, ServerCosts(merge=3.0))
    run.until(4)
    # Both arrive at 1; two merges take until 7; the next results are there at 8.
    assert [time for time, _ in run.lines("arrival")] == [1, 1, 8, 8]


def test_events_wait_until_the_server_is_free():
    fleet = Fleet((DeviceProfile(seconds_per_task=1), DeviceProfile(seconds_per_task=2)), seed=0)
    run = ToyRun(toy_server("fedasync"), fleet, ServerCosts(merge=3.0))
    run.until(3)
    # Device 0 merges from 1 to 4; device 1 has been there since 2 and is taken up at 4, until 7;
    # device 0's second result is ready at 5 and has to wait.
    times = [(time, fields["device"]) for time, fields in run.lines("arrival")]
    assert times == [(1, 0), (4, 1), (7, 0)]


def test_evaluations_cost_server_time():
    run = ToyRun(toy_server("fedasync"), toy_fleet(1), ServerCosts(evaluate=10.0))
    run.until(1)
    run.engine.charge_evaluation()
    run.until(2)
    assert run.engine.now == 11.0


def test_timeouts_close_a_round():
    run = ToyRun(toy_server("fedavg", {"timeout": 2.5}), toy_fleet())
    run.until(epochs=1)
    assert run.engine.now == 2.5
    assert run.lines("commit")[0][1]["updates"] == 2


def test_results_do_not_depend_on_execution_order():
    """Device 4 ends up at the same place however fast it is."""
    slow, fast = toy_fleet(5), toy_fleet(5)
    fast = replace(
        fast, devices=(*fast.devices[:4], replace(fast.devices[4], seconds_per_task=0.1))
    )
    versions = []
    for fleet in (slow, fast):
        run = ToyRun(toy_server("standalone"), fleet)
        while len([1 for _, f in run.lines("arrival") if f["device"] == 4]) < 2:
            run.until(run.server.accepted + 1)
        versions.append(run.heads()["device-4"])
    assert versions[0] == versions[1]


def test_a_crashed_device_does_not_come_back_early_with_its_window():
    profile = DeviceProfile(
        seconds_per_task=4,
        crash=0.5,
        restart_seconds=50,
        detect_seconds=1,
        windows=((0.0, 10.0),),
        period=20.0,
    )
    run = ToyRun(toy_server("fedasync"), Fleet((profile,), seed=1))
    run.until(20)
    assert run.lines("drop")
    at_work = 0
    for _, kind, _ in run.log:
        at_work += {"dispatch": 1, "arrival": -1, "drop": -1}.get(kind, 0)
        assert at_work <= 1


def test_a_busy_server_does_not_run_past_the_end():
    run = ToyRun(toy_server("fedasync"), toy_fleet(), ServerCosts(merge=300.0))
    assert run.until(virtual_seconds=100) == "virtual_seconds"
    assert run.engine.now <= 100


def test_a_long_restart_is_no_stand():
    fleet = toy_fleet(2, crash=0.5, restart_seconds=3e5, detect_seconds=1)
    run = ToyRun(toy_server("fedasync"), fleet)
    assert run.until(20) == "updates"

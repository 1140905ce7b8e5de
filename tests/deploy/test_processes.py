"""Processes are identified by pid and start time; others are never signalled."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from latecomer.deploy import processes
from latecomer.deploy.pids import SUPERVISOR, PidFile
from latecomer.deploy.processes import Process, end, process, start_time, with_variable
from latecomer.errors import BadInput

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper():
    child = subprocess.Popen(SLEEP, env={**os.environ, "LATECOMER_TEST": str(os.getpid())})
    yield child
    child.kill()
    child.wait()


def until(condition, seconds=10.0):
    end_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_at
        time.sleep(0.02)


def test_a_process_is_alive_until_it_ends(sleeper):
    one = process(sleeper.pid)
    assert one.is_alive()
    assert one.state() == "alive"
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: one.state() == "stopped")
    sleeper.kill()
    # A zombie that was not reaped counts as gone.
    until(lambda: not one.is_alive())
    assert one.state() == "gone"
    sleeper.wait()
    assert start_time(sleeper.pid) is None
    assert process(sleeper.pid) is None


def test_another_process_with_the_same_pid_is_spared(sleeper):
    foreign = Process(sleeper.pid, "an earlier one")
    assert not foreign.is_alive()
    end([foreign], timeout=0.1)
    assert sleeper.poll() is None


def test_without_proc_ps_gives_the_start_times(sleeper, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "PROC", tmp_path)
    one = process(sleeper.pid)
    assert one is not None
    assert one.is_alive()
    assert not Process(sleeper.pid, "Mon-1").is_alive()
    assert list(with_variable("LATECOMER_TEST", str(os.getpid()))) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_are_found_by_their_environment_and_ended(sleeper):
    until(lambda: [p.pid for p in with_variable("LATECOMER_TEST", str(os.getpid()))])
    found = list(with_variable("LATECOMER_TEST", str(os.getpid())))
    assert [one.pid for one in found] == [sleeper.pid]
    assert list(with_variable("LATECOMER_TEST", f"{os.getpid()}0")) == []
    end(found)
    assert sleeper.wait(5) != 0


def test_a_process_that_ignores_sigterm_is_killed():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    child = subprocess.Popen(
        [sys.executable, "-c", deaf + "time.sleep(60)"], stdout=subprocess.PIPE
    )
    child.stdout.readline()
    end([process(child.pid)], timeout=0.2)
    assert child.wait(5) == -9
    child.stdout.close()


def test_a_pid_file_is_claimed_by_one_at_a_time(tmp_path, sleeper):
    file = PidFile(tmp_path / "processes.json")
    other = process(sleeper.pid)
    file.path.write_text(json.dumps({"superlink": [other.pid, other.started]}))
    with pytest.raises(BadInput, match=f"superlink {sleeper.pid}.*deploy down --dir"):
        file.claim()
    assert not file.is_claimed
    file.release()
    assert file.path.exists()
    sleeper.kill()
    sleeper.wait()
    file.claim()
    assert set(file.alive()) == {SUPERVISOR}
    file.write({"node": other})
    assert set(file.read()) == {SUPERVISOR, "node"}
    assert set(file.alive()) == {SUPERVISOR}
    file.release()
    assert not file.path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": ["x", 1]}'])
def test_a_damaged_pid_file_lists_no_process(tmp_path, text):
    file = PidFile(tmp_path / "processes.json")
    file.path.write_text(text)
    assert file.read() == {}
    file.claim()
    assert set(file.read()) == {SUPERVISOR}

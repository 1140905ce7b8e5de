"""What dies is started again, what is stopped stays down, and nothing is left."""

import os
import signal
import sys
import time

import pytest

from latecomer.deploy.processes import process
from latecomer.deploy.supervised import BackOff, Supervised

QUICK = BackOff(first=0.05, longest=0.2, healthy=60.0)


def until(condition, seconds=10.0):
    end_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_at
        time.sleep(0.02)


@pytest.fixture
def supervised(tmp_path):
    made = []

    def make(code, **options):
        command = [sys.executable, "-c", code]
        log = tmp_path / "logs" / "it.log"
        one = Supervised("it", command, log, os.environ, tmp_path, QUICK, **options)
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.stop(1.0)


def test_it_is_started_again_when_it_is_killed(supervised):
    changes = []
    it = supervised(
        "import time; print('here', flush=True); time.sleep(60)",
        on_change=lambda: changes.append(1),
    )
    first = it.kill()
    until(lambda: it.pid not in (None, first))
    until(lambda: it.text().count("here") >= 1 and "here" in it.text(since_start=True))
    assert it.starts == 2
    assert len(changes) == 3  # there, gone, there
    second = it.process
    it.stop()
    assert it.pid is None
    assert not second.is_alive()
    with pytest.raises(ProcessLookupError, match="does not run"):
        it.kill()
    it.start()
    assert it.pid is not None


def test_each_failure_makes_it_wait_longer(supervised):
    assert [QUICK.after(n) for n in range(4)] == [0.05, 0.1, 0.2, 0.2]
    assert BackOff().after(10_000) == 15.0
    it = supervised("raise SystemExit(3)")
    until(lambda: it.starts >= 4)


def test_its_children_go_with_it_and_even_one_that_is_stopped_does(supervised):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    it = supervised(code)
    until(lambda: it.text().strip())
    child = process(int(it.text().split()[0]))
    assert child.is_alive()
    it.kill(signal.SIGSTOP)
    it.stop(2.0)
    until(lambda: not child.is_alive())
    assert it.pid is None

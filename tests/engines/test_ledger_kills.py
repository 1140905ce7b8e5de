"""A private device killed at any point, or run twice at once, never releases more than it charged.

Each device is a process forked from this one, so that imports are paid once. It answers tasks and
appends each update to a file, which stands for the network: what is in the file was released.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from latecomer.core.messages import Task, TrainSpec
from latecomer.device.disk import DeviceDisk
from latecomer.device.flat import flat_model
from latecomer.device.ledger import Ledger
from latecomer.device.privacy import Privacy
from latecomer.engines import agent as agent_module
from latecomer.engines.agent import Agent
from latecomer.engines.wire import encode_task

MODEL = flat_model("mlp", (4,), 3, (5,))
SIZE = MODEL.layout.size
TASKS = 3  # of one process
TRACED = [f"/latecomer/{part}" for part in ("device/", "engines/agent.py", "engines/wire.py")]
NOISE = 1e4  # an update is its noise


def data():
    rng = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=rng), torch.arange(6) % 3


def task(key, where):
    spec = TrainSpec(local_epochs=1, batch_size=6, lr=1.0 if where == "step" else 0.1)
    return encode_task(Task(0, 0, 0, "main", 0, spec, MODEL.init(1)), key, "r")


@pytest.fixture(autouse=True, scope="module")
def warm(tmp_path_factory):
    """Import and compile in this process what every forked device needs."""
    torch.set_num_threads(1)
    for where in ("update", "step"):
        folder = tmp_path_factory.mktemp(where)
        Agent("warm", MODEL, data, folder, private(where)).answer(task("a", where))


def private(where):
    return Privacy("gaussian", NOISE, clip=1.0, delta=1e-5, where=where)


def device(folder, name, where="update", kill_at=0):
    """Answer tasks in a forked process, which kills itself before its traced line `kill_at`."""
    pid = os.fork()
    if pid:
        return pid
    try:
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            if not any(part in frame.f_code.co_filename for part in TRACED):
                return None
            lines += event == "line"
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        agent = Agent("kitchen", MODEL, data, folder / "state", private(where))
        released = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if kill_at:
            sys.settrace(trace)
        for number in range(TASKS):
            answer = agent.answer(task(f"{name}-{number}", where))
            os.write(released, answer.array.data[-4 * SIZE :])
        sys.settrace(None)
        if kill_at:
            (folder / "lines").write_text(str(lines))
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def ended(pid):
    """Wait for a device; whether it was killed."""
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def released(folder):
    """The updates that left the device."""
    path = folder / "released"
    content = path.read_bytes() if path.exists() else b""
    assert len(content) % (4 * SIZE) == 0
    return torch.from_numpy(np.frombuffer(bytearray(content), "f4")).view(-1, SIZE)


def charged(folder):
    disk = DeviceDisk(folder / "state")
    rows = disk.load_ledger(disk.load())
    return 0 if rows is None else sum(n for _, n in Ledger.from_tensor(rows).history)


def check(folder):
    """The counts of charges and releases; no two released updates have the same noise."""
    updates, charges = released(folder), charged(folder)
    assert charges >= len(updates)
    if len(updates) > 1:
        together = torch.corrcoef(updates.double()).fill_diagonal_(0.0)
        assert together.max() < 0.95
    return charges, len(updates)


def kills(folder, number, seed):
    """Kill devices at random lines, and at random times from outside, in turn.

    Returns the numbers of killed processes, charges and released updates.
    """
    folder.mkdir()
    assert not ended(device(folder, "whole", kill_at=10**9))
    lines, rng = int((folder / "lines").read_text()), random.Random(seed)
    begun = time.monotonic()
    assert not ended(device(folder, "timed"))
    seconds, killed, tried = time.monotonic() - begun, 0, 0
    while killed < number:
        tried += 1
        if tried % 2:
            killed += ended(device(folder, f"k{tried}", kill_at=rng.randrange(1, lines)))
        else:
            pid = device(folder, f"k{tried}")
            time.sleep(rng.uniform(0.0, seconds))
            os.kill(pid, signal.SIGKILL)
            killed += ended(pid)
        if tried % 50 == 0:
            check(folder)
    return killed, *check(folder)


def test_a_device_killed_at_any_point_has_charged_what_it_released(tmp_path):
    killed, charges, updates = kills(tmp_path / "d", 24, seed=1)
    assert (killed, charges >= updates > 6) == (24, True)


@pytest.mark.slow
def test_a_thousand_kills(tmp_path, capsys):
    killed, charges, updates = kills(tmp_path / "d", 1000, seed=2)
    with capsys.disabled():
        print(f"\n{killed} kills: {charges} charged, {updates} released, no noise twice")


def test_a_device_killed_between_charge_and_release_has_charged_only(tmp_path, monkeypatch):
    def killed(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(agent_module, "encode_update", killed)
    assert ended(device(tmp_path, "a"))
    assert check(tmp_path) == (1, 0)


@pytest.mark.parametrize("where", ["update", "step"])
def test_two_processes_of_one_device_charge_every_update(tmp_path, where):
    for attempt in range(5):
        for pid in [device(tmp_path, f"{name}{attempt}", where) for name in "ab"]:
            assert not ended(pid)
    assert check(tmp_path) == (30, 30)
    assert not list(Path(tmp_path / "state").glob("*.new"))

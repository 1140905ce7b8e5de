"""`latecomer deploy up`, as a user runs it: real processes, TLS, keys; and nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from latecomer.deploy.guard import FOLDER_VARIABLE
from latecomer.deploy.local import LocalFederation
from latecomer.deploy.processes import with_variable
from latecomer.errors import BadInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-digits"
LATECOMER = [sys.executable, "-m", "latecomer"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc"),
]


def remote_addresses(pid):
    """Remote addresses of a process, as the kernel writes them, without loopback."""
    found = set()
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return found
    inodes = {m[1] for link in links if (m := re.fullmatch(r"socket:\[(\d+)\]", link))}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            field = line.split()
            address = field[2].split(":")[0]
            here = address.endswith("7F") or not address.strip("0")
            if field[9] in inodes and not here and address != "0" * 24 + "01000000":
                found.add(f"{table} {field[2]}")
    return found


class Watch(threading.Thread):
    """Looks at the connections of all processes of a federation while it runs."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.seen, self.looked, self.over = folder, set(), 0, threading.Event()

    def run(self):
        while not self.over.wait(0.2):
            for one in with_variable(FOLDER_VARIABLE, str(self.folder)):
                self.looked += 1
                self.seen |= remote_addresses(one.pid)


def test_the_example_in_one_command_with_tls_and_no_process_is_left(tmp_path):
    folder = tmp_path / "federation"
    watch = Watch(folder)
    watch.start()
    done = subprocess.run(
        [*LATECOMER, "deploy", "up", str(EXAMPLE), "--devices", "3", "--tls", "--dir", str(folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    watch.over.set()
    watch.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(with_variable(FOLDER_VARIABLE, str(folder))) == []
    assert not (folder / "processes.json").exists()
    assert watch.looked > 20
    assert watch.seen == set()
    log = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    tasks = [line["task"] for line in log if line["event"] == "arrival"]
    assert len(tasks) == len(set(tasks)) == 40
    names = {line["name"] for line in log if line["event"] == "introduction"}
    assert names == {"device-0", "device-1", "device-2"}
    assert not [line for line in log if line["event"] in ("refusal", "drop")]
    assert (folder / "run" / "model.safetensors").exists()
    accuracy = float(re.findall(r"finished in .* accuracy ([\d.]+)", done.stdout)[0])
    assert accuracy > 0.85
    # Every device is slower than the one before.
    counts = [int(n) for n in re.findall(r"device-\d (\d+)", done.stdout.splitlines()[-2])]
    assert counts[0] > counts[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_leaves_nothing_and_another_terminal_sees_it(tmp_path, number):
    folder = tmp_path / "federation"
    command = [*LATECOMER, "deploy", "up", str(EXAMPLE), "--devices", "1", "--dir", str(folder)]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in up.stdout:
            if "started" in line:
                break
        there = subprocess.run(
            [*LATECOMER, "deploy", "status", "--dir", str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert f"{folder}: up" in there
        assert "device-0-client" in there
        with pytest.raises(BadInput, match="a federation runs there"):
            LocalFederation(EXAMPLE, 1, folder).start()
        deadline = time.monotonic() + 30  # processes may still be starting
        while len(list(with_variable(FOLDER_VARIABLE, str(folder)))) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        up.send_signal(number)
        assert up.wait(60) == 1
        assert "error: interrupted" in up.stdout.read()
        assert list(with_variable(FOLDER_VARIABLE, str(folder))) == []
    finally:
        up.kill()
        up.wait()
        up.stdout.close()
        for one in with_variable(FOLDER_VARIABLE, str(folder)):
            one.send(signal.SIGKILL)


def test_what_a_killed_supervisor_leaves_is_ended(tmp_path):
    folder = tmp_path / "federation"
    command = [*LATECOMER, "deploy", "up", str(EXAMPLE), "--devices", "1", "--dir", str(folder)]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in up.stdout:
            if "started" in line:
                break
        up.kill()
        up.wait()
        deadline = time.monotonic() + 20
        while list(with_variable(FOLDER_VARIABLE, str(folder))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(with_variable(FOLDER_VARIABLE, str(folder))) == []
        down = [*LATECOMER, "deploy", "down", "--dir", str(folder)]
        output = subprocess.run(down, timeout=60, check=True, capture_output=True, text=True).stdout
        assert "nothing was running" in output
    finally:
        up.kill()
        up.wait()
        up.stdout.close()
        for one in with_variable(FOLDER_VARIABLE, str(folder)):
            one.send(signal.SIGKILL)

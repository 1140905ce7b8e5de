"""The example apps, run by Flower's own simulation: its processes, its messages, its clock."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")
pytest.importorskip("ray", reason="needs flwr[simulation]")

import latecomer
from flower_apps import migrated
from flwr_processes import QUIET, of_our_own

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent
PLAIN = {**QUIET, "NO_COLOR": "1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    """A SuperLink of our own that simulates; gives the environment to run apps on it."""
    home, port = tmp_path_factory.mktemp("flwr"), free_port()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n\n'
        f'[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **PLAIN, "FLWR_HOME": str(home), "PATH": path}
    command = [BIN / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=log, stderr=log)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail((home / "log").read_text()[-2000:])
        yield env
    finally:
        process.terminate()
        process.wait(timeout=30)
        for pid in of_our_own(home):
            os.kill(pid, signal.SIGKILL)  # a simulation that was cut off goes on without it


def ran(env, folder, name, strategy):
    """Output of the app, and its event log."""
    command = [BIN / "flwr", "run", EXAMPLES / name, "test", "--stream"]
    nodes = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    config = ["--run-config", f'updates=30 strategy="{strategy}" folder="{folder}/run"']
    done = subprocess.run(
        [*command, *nodes, *config],
        env={**env, "LATECOMER_STATE": str(folder / "devices")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = done.stdout + done.stderr
    assert "ended by updates: 30 updates" in output, output[-3000:]
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    arrived = [line for line in log if line["event"] == "arrival"]
    assert {line["device"] for line in arrived} == {0, 1, 2}
    assert not [line for line in log if line["event"] in ("refusal", "drop")]
    return output, log


def test_an_app_with_two_changed_lines_runs_on_flowers_simulation(superlink, tmp_path):
    app, folder = migrated(tmp_path), tmp_path / "run"
    text = (app / "digits_cnn" / "server_app.py").read_text()
    changed = text.replace(
        'AsyncStrategy("fedbuff",', f'AsyncStrategy("fedbuff", folder="{folder}",'
    )
    (app / "digits_cnn" / "server_app.py").write_text(changed)
    command = [BIN / "flwr", "run", app, "test", "--stream"]
    command += ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    command += ["--run-config", "num-server-rounds=4"]
    done = subprocess.run(command, env=superlink, capture_output=True, text=True, timeout=580)
    table = latecomer.load(folder).metrics
    assert (table["updates"] // 3).tolist() == list(range(5)), done.stdout[-3000:]
    assert table["accuracy"].iloc[-1] > 0.3
    assert table["client_nodes"].iloc[-1] == 3
    assert (folder / "model.safetensors").is_file()


def test_broadcasts_reach_devices_at_work(superlink, tmp_path):
    _, log = ran(superlink, tmp_path, "flower-digits", "echopfl")
    given = {line["task"]: line["version"] for line in log if line["event"] == "dispatch"}
    arrived = [line for line in log if line["event"] == "arrival"]
    assert [line for line in log if line["event"] == "broadcast"]
    # Tasks of two passes: one that was broadcast to in its first has gone on from the newer model.
    assert [line for line in arrived if line["sent"] > given[line["task"]]]

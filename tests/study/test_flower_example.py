"""The example of docs/deploy.md, as a user runs it: Flower's own simulation, in real time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flwr_processes import QUIET, of_our_own

pytest.importorskip("flwr", reason="needs the extra 'flower'")
pytest.importorskip("ray", reason="needs flwr[simulation]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-digits"


@pytest.fixture
def flwr(tmp_path):
    home = tmp_path / "flower"
    home.mkdir()
    command = Path(sys.executable).with_name("flwr")
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    own = {"FLWR_HOME": str(home), "LATECOMER_STATE": str(tmp_path / "devices"), "PATH": path}

    def run(*arguments):
        return subprocess.run(
            [command, *arguments],
            env={**os.environ, **QUIET, **own},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    yield run
    for pid in of_our_own(home):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc")
def test_the_digits_app_runs_on_flowers_simulation_and_goes_on_when_it_is_run_again(flwr, tmp_path):
    fleet = "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=2"
    folder = tmp_path / "run"
    for updates in (30, 45):
        config = f'folder="{folder}" updates={updates}'
        done = flwr(
            "run", str(EXAMPLE), "--stream", "--run-config", config, "--federation-config", fleet
        )
        assert f"ended by updates: {updates} updates" in done.stdout, done.stdout + done.stderr
    log = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    tasks = [line["task"] for line in log if line["event"] == "arrival"]
    assert len(tasks) == len(set(tasks)) == 45
    assert not [line for line in log if line["event"] in ("refusal", "drop")]
    assert sum(line["event"] == "introduction" for line in log) == 3
    assert (folder / "model.safetensors").exists()
    accuracy = float(done.stdout.split("accuracy ")[1].split()[0])
    assert accuracy > 0.85

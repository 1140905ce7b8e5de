"""A Flower app without Latecomer on its nodes: real processes, TLS and keys, a kill, a resume."""

import json
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flower_apps import APPS, migrated
from latecomer.deploy.local import LocalFederation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc"),
]


def events(folder, kind):
    try:
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [each for each in found if each["event"] == kind]


def wait(done, seconds=300):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_two_changed_lines_on_three_nodes_with_tls_a_killed_server_and_a_resume(tmp_path):
    app, folder, rounds = migrated(tmp_path), tmp_path / "federation", 5
    with LocalFederation(app, 3, folder, tls=True, slowest=1.0) as federation:
        federation.start()
        federation.run({"num-server-rounds": rounds})
        wait(lambda: len(events(folder, "arrival")) >= 4)
        (server,) = federation.runs.serverapps()
        server.send(signal.SIGKILL)
        wait(lambda: not federation.runs.serverapps())
        before = len(events(folder, "arrival"))
        assert before < 3 * rounds
        federation.runs.cancel()
        run = federation.run({"num-server-rounds": rounds})
        assert federation.runs.wait(run, 500) == "finished:completed", federation.runs.log()
    tasks = [each["task"] for each in events(folder, "arrival")]
    assert len(tasks) == len(set(tasks)) == 3 * rounds
    assert len(events(folder, "resume")) == 1
    assert events(folder, "refusal") + events(folder, "drop") == []
    assert len(events(folder, "introduction")) == 3
    table = pd.read_csv(folder / "run" / "metrics.csv")
    # `evaluate_fn` was called for every round, before and after the kill, and nodes evaluated.
    assert (table["updates"] // 3).tolist() == list(range(rounds + 1))
    assert table["accuracy"].iloc[-1] > 0.7
    assert table["client_nodes"].iloc[-1] == 3
    assert table["client_eval_acc"].iloc[-1] > 0.5
    assert table["train_loss"].iloc[-1] < table["train_loss"].iloc[1]
    for name in ("model.safetensors", "report.html"):
        assert (folder / "run" / name).is_file()


def test_an_unchanged_app_of_flowers_is_followed_by_its_log(tmp_path):
    command = [sys.executable, "-m", "latecomer", "deploy", "up", str(APPS / "numpy_app")]
    command += ["--devices", "2", "--dir", str(tmp_path / "f"), "--slowest", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = next(line for line in done.stdout.splitlines() if line.startswith("finished"))
    assert "round 3 of 3, 3 versions, 6 updates, accuracy 0." in last
    # Three rounds wait for the slow node each: warm nodes delay the replies of any app.
    assert float(last.split()[2]) > 9

"""Two processes must not write one run."""

import subprocess
import sys

import pytest

import latecomer
from fake_grid import FakeTransport, ToyNode
from latecomer.device.lock import FolderLock
from latecomer.engines.virtual import Bounds
from latecomer.errors import BadInput
from latecomer.study.deployed import Deployment
from latecomer.study.runner import resume_run
from toy import toy_fleet, toy_server

CONFIG = {"fleet": {"devices": 4}, "stop": {"updates": 8}, "engine": {"kernel": "plain"}}
HOLDS = "import sys, time\nfrom pathlib import Path\nfrom latecomer.device.lock import FolderLock\n"
HOLDS += "lock = FolderLock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"


def test_it_is_refused_while_another_process_holds_it_and_not_after_that_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(BadInput, match="another process is using this run"):
                FolderLock(tmp_path)
        finally:
            other.kill()
            other.wait()
    FolderLock(tmp_path).close()


def test_a_simulated_run_is_resumed_by_one_only(tmp_path):
    latecomer.run(CONFIG, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with FolderLock(tmp_path / "run"), pytest.raises(BadInput, match="another process"):
        resume_run(tmp_path / "run")
    assert resume_run(tmp_path / "run")["updates"] == 8


def a_deployment(folder):
    transport = FakeTransport(toy_fleet(), {i: ToyNode(f"toy-{i}") for i in range(5)})
    return Deployment(toy_server("fedasync"), transport, folder)


def test_a_deployed_run_is_resumed_by_one_only(tmp_path):
    first = a_deployment(tmp_path / "run")
    with pytest.raises(BadInput, match="another process"):
        a_deployment(tmp_path / "run")
    first.run(Bounds(5))
    assert a_deployment(tmp_path / "run").run(Bounds(10)) == "updates"


def test_a_damaged_checkpoint_leaves_no_lock(tmp_path):
    a_deployment(tmp_path).run(Bounds(5))
    for pointer in ("latest", "previous"):
        (tmp_path / "checkpoint" / pointer).write_text("nowhere")
    for _ in range(2):
        with pytest.raises(BadInput, match="damaged"):
            a_deployment(tmp_path)

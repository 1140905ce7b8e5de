"""What a user types: mistakes are one line and exit code 2."""

import json
import os
import stat
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from latecomer.cli import app
from latecomer.deploy.flower_app import parse_settings
from latecomer.deploy.flower_server import FlowerServer
from latecomer.deploy.folders import MARKER, PIDS, RUNS, check_folder, find_folder
from latecomer.deploy.node import NodeOptions, config_text, supernode_command
from latecomer.deploy.processes import process
from latecomer.deploy.runs import Runs
from latecomer.deploy.serve_node import read_config
from latecomer.deploy.warm import Executor, PollInterval, is_known, main
from latecomer.errors import BadInput
from latecomer.study.files import numbered_folder

NODES = [{"status": "online"}, {"status": "offline"}, {"status": "unregistered"}]
SETTINGS = {"updates": 40, "strategy": "fedasync", "lr": 0.1}


def latecomer(*arguments):
    return CliRunner().invoke(app, ["deploy", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "nowhere"], "not a Flower app, there is no pyproject.toml"),
        (["up", ".", "--dir", "full"], "not a Flower app"),
        (["status"], "no federation under"),
        (["down", "--dir", "full"], "there is no federation in it"),
        (["new", "full"], "is not empty"),
        (["node", "--superlink", "here"], "HOST:PORT"),
        (["node", "--superlink", "https://h:1"], "HOST:PORT"),
        (["node", "--superlink", "h:99999"], "HOST:PORT"),
        (["node", "--superlink", "h:1", "--key", "no"], "--key no: no such file"),
        (["node", "--superlink", "h:1", "--node-config", "a b"], "write pairs"),
        (["node", "--superlink", "h:1", "--node-config", "max-epochs=ten"], "max-epochs = ten"),
        (["node", "--superlink", "h:1", "--trusted-entities", "no"], "--trusted-entities no: no"),
        (["node", "--superlink", "h:1", "--insecure", "--key", "full/x"], "--insecure"),
    ],
)
def test_mistakes(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    done = latecomer(*arguments)
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_an_app_without_components_is_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "names no serverapp" in str(latecomer("up", str(tmp_path)).exception)
    (tmp_path / "pyproject.toml").write_text("[project\n")
    assert "not a Flower app" in str(latecomer("up", str(tmp_path)).exception)


def test_settings_of_an_app():
    found = parse_settings(["updates=3", "strategy=fedbuff", "lr=0.5"], SETTINGS)
    assert found == {"updates": 3, "strategy": "fedbuff", "lr": 0.5}
    assert config_text(found) == 'updates=3 strategy="fedbuff" lr=0.5'
    assert config_text({"a": True, "b": "x y"}) == 'a=true b="x y"'
    for text, message in {
        "updats=3": "did you mean 'updates'",
        "updates": "key=value",
        "updates=[1]": "a text, a number",
    }.items():
        with pytest.raises(BadInput, match=message):
            parse_settings([text], SETTINGS)


def test_node_configs():
    text = "device-id=\"kitchen\" partition-id=0 place='first floor'"
    assert read_config(text) == {
        "device-id": "kitchen",
        "partition-id": "0",
        "place": "first floor",
    }
    assert read_config("") == {}
    for bad in ("kitchen", "a = 1", 'a="x', "=1"):
        with pytest.raises(BadInput, match="write pairs"):
            read_config(bad)


def test_a_warm_node_gets_the_options_of_a_stock_one(tmp_path):
    paths = [tmp_path / "ca", tmp_path / "key"]
    options = NodeOptions("h:1", 2, "a=1", *paths, True, trusted_entities=tmp_path / "keys.yaml")
    command = supernode_command(options, tmp_path / "secret")
    assert command[1:4] == ["-m", "latecomer.deploy.warm", "supernode"]
    assert command[command.index("--isolation") + 1] == "process"
    for option, value in {
        "--superlink": "h:1",
        "--port": "2",
        "--node-config": "a=1",
        "--root-certificates": str(tmp_path / "ca"),
        "--auth-supernode-private-key": str(tmp_path / "key"),
        "--trusted-entities": str(tmp_path / "keys.yaml"),
    }.items():
        assert command[command.index(option) + 1] == value
    assert "--insecure" not in command


def test_a_restarted_client_gets_its_token_where_other_users_cannot_read_it(monkeypatch):
    """In the environment, which the new process clears before it runs an app."""
    calls, runs = [], []
    monkeypatch.setattr(os, "execve", lambda *given: calls.append(given))
    Executor("h:1", 5, "file")._restart("t0ken", "a-fab")
    ((_, command, environment),) = calls
    assert "t0ken" not in " ".join(command)
    monkeypatch.setattr(Executor, "run", lambda self, *given: runs.append(given))
    monkeypatch.setattr(os, "environ", environment)
    main(command[3:])
    assert runs == [("t0ken", "a-fab")]
    assert "t0ken" not in environment.values()


def test_the_database_is_readable_by_its_owner_only(tmp_path):
    server = FlowerServer(tmp_path, 1, False, {})
    server.database.touch(mode=0o644)  # of an earlier version
    server.prepare()
    assert stat.S_IMODE(server.database.stat().st_mode) == 0o600
    assert not server.has_runs
    server.database.write_text("x")
    assert server.has_runs


def test_a_node_polls_often_after_work_and_rarely_when_idle():
    interval = PollInterval(0.1, 3.0, growth=2.0)
    assert [interval.wait() for _ in range(7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0]
    interval.reset()
    assert interval.wait() == 0.1
    assert is_known("1.41.0")
    assert not is_known("1.4.1")
    assert not is_known("2.0.0")


def test_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = numbered_folder(RUNS, "deploy-app")
    check_folder(first)
    for name in ("1", "2"):
        (tmp_path / "runs" / f"deploy-app-{name}").mkdir(parents=True)
        (tmp_path / "runs" / f"deploy-app-{name}" / MARKER).write_text("{}")
    assert numbered_folder(RUNS, "deploy-app").name == "deploy-app-3"
    check_folder(first)  # it is a federation's, which goes on
    assert find_folder(None).name == "deploy-app-2"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        one = process(child.pid)
        (first / PIDS).write_text(json.dumps({"superlink": [one.pid, one.started]}))
        assert find_folder(None) == first
        for answer, text in (({"nodes": NODES}, "hears from 1 of 2 nodes"), ({}, "not answer")):
            monkeypatch.setattr(Runs, "_json", lambda self, *given, found=answer: found)
            output = latecomer("status").stdout
            assert f"{first}: up" in output
            assert f"{one.pid}  alive" in output
            assert text in output
        assert "1 processes ended" in latecomer("down").stdout
        assert child.wait(5) != 0
        assert "nothing was running" in latecomer("down", "--dir", str(first)).stdout
    finally:
        child.kill()
        child.wait()


def test_down_spares_a_process_that_has_taken_the_pid_of_ours(tmp_path):
    (tmp_path / MARKER).write_text("{}")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / PIDS).write_text(json.dumps({"superlink": [child.pid, "long ago"]}))
        assert "nothing was running" in latecomer("down", "--dir", str(tmp_path)).stdout
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()

"""A run that was stopped and goes on is the run that was never stopped, bit for bit."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from latecomer import cli
from latecomer.errors import BadInput, RunFailed
from latecomer.strategies.recipe import recipes
from latecomer.study.config import Config, load_config
from latecomer.study.runner import Silent, resume_run, start_run

MakeConfig = Callable[..., Config]


class Killed(BaseException):
    """Stands for a kill: no checkpoint is written."""


class After(Silent):
    """Does something once a run has taken in so many updates."""

    def __init__(self, updates: int, action: Callable[[], None]) -> None:
        self.updates, self.action = updates, action

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= self.updates:
            self.action()


def die() -> None:
    raise Killed


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def start_and_kill(config: Config, folder: Path, updates: int) -> None:
    with pytest.raises(Killed):
        start_run(config, folder, After(updates, die))


def resume_and_kill(folder: Path, updates: int) -> None:
    with pytest.raises(Killed):
        resume_run(folder, After(updates, die))


def same_files(one: Path, other: Path) -> None:
    """The same history but for the wall clock."""
    assert (one / "events.jsonl").read_bytes() == (other / "events.jsonl").read_bytes()
    tables = [pd.read_csv(f / "metrics.csv").drop(columns="wall_seconds") for f in (one, other)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    models = [{p.name: p.read_bytes() for p in f.glob("*.safetensors")} for f in (one, other)]
    assert models[0] == models[1]
    assert models[0]
    assert summary_of(one) == summary_of(other)


def summary_of(folder: Path) -> Mapping[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    found.pop("wall_seconds")
    return dict(found)


def uneven_fleet(folder: Path) -> list[str]:
    """Crashes, dropouts, jitter and windows that open and close within a short run."""
    path = folder / "fleet.csv"
    lines = ["device,seconds_per_task,jitter,crash,dropout,detect_seconds,restart_seconds"]
    lines[0] += ",up,period,window_start,window_end"
    for d in range(10):
        window = f"60,{5 * d},{5 * d + 25}" if d % 2 else ",,"
        lines.append(f"{d},{1 + d},0.4,0.2,0.02,2,3,20000,{window}")
    path.write_text("\n".join(lines) + "\n")
    return ["fleet.profile=trace", f'fleet.path="{path}"']


def fleet_in_step(folder: Path) -> list[str]:
    """Whole seconds: uploads that were begun at different moments come in at the same one."""
    path = folder / "in-step.csv"
    lines = [f"{device},{1 + device % 3}" for device in range(10)]
    path.write_text("\n".join(["device,seconds_per_task", *lines]) + "\n")
    return ["fleet.profile=trace", f'fleet.path="{path}"']


PHONES = ["fleet.profile=phones", "fleet.crash=0.1", "fleet.dropout=0.02", "fleet.jitter=0.4"]
SAVING = ["checkpoint.every=7", "evaluate.every=9"]
LATE = ["fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay={gamma = 3}"]


# tests/test_conformance.py resumes every strategy on a fleet in step, on a toy problem.
@pytest.mark.parametrize("strategy", list(recipes()))
@pytest.mark.parametrize(
    "fleet",
    [
        "uneven-late",
        pytest.param("in-step-late", marks=pytest.mark.slow),
        pytest.param("phones", marks=pytest.mark.slow),
    ],
)
def test_killed_twice_and_resumed(
    tiny: MakeConfig, tmp_path: Path, strategy: str, fleet: str
) -> None:
    kinds = {
        "phones": PHONES,
        "uneven-late": [*uneven_fleet(tmp_path), *LATE],
        "in-step-late": [*fleet_in_step(tmp_path), *LATE],
    }
    config = tiny(f"strategy.name={strategy}", "stop.updates=40", *SAVING, *kinds[fleet])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start_run(config, whole)
    start_and_kill(config, cut, 12)
    assert (cut / "checkpoint" / "latest").is_file()
    resume_and_kill(cut, 30)
    resume_run(cut)
    same_files(whole, cut)


def test_the_uneven_fleet_is_uneven(tiny: MakeConfig, tmp_path: Path) -> None:
    """The test above would mean less if nothing was ever lost."""
    start_run(tiny("stop.updates=40", *uneven_fleet(tmp_path)), tmp_path / "run")
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert sum(event["event"] == "drop" for event in events) >= 2
    arrivals = [event for event in events if event["event"] == "arrival"]
    assert len({event["time"] for event in arrivals}) > 30


@pytest.mark.parametrize("updates", [0, 3])
def test_killed_before_the_first_checkpoint(tiny: MakeConfig, tmp_path: Path, updates: int) -> None:
    config = tiny("stop.updates=20", *SAVING, *PHONES)
    start_run(config, tmp_path / "whole")
    start_and_kill(config, tmp_path / "cut", updates)
    assert not (tmp_path / "cut" / "checkpoint" / "latest").exists()
    resume_run(tmp_path / "cut")
    same_files(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(
    tiny: MakeConfig, tmp_path: Path, number: signal.Signals
) -> None:
    config = tiny("strategy.name=fedbuff", "stop.updates=40", *PHONES)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    start_run(config, whole)
    before = signal.getsignal(number)
    with pytest.raises(RunFailed, match=r"after 1\d updates.*latecomer run --resume .*cut"):
        start_run(config, cut, After(13, lambda: os.kill(os.getpid(), number)))
    assert signal.getsignal(number) is before
    assert (cut / "checkpoint" / "latest").read_text().startswith("updates-1")
    resume_run(cut)
    same_files(whole, cut)


@pytest.fixture
def stopped(tiny: MakeConfig, tmp_path: Path) -> Path:
    """A run that was stopped with a checkpoint at about 20 of 40 updates."""
    folder = tmp_path / "stopped"
    with pytest.raises(RunFailed):
        start_run(tiny("stop.updates=40"), folder, After(20, terminate))
    return folder


def latest(folder: Path) -> Path:
    return folder / "checkpoint" / (folder / "checkpoint" / "latest").read_text()


def test_only_the_owner_reads_a_checkpoint(stopped: Path) -> None:
    places = [stopped / "checkpoint", *(stopped / "checkpoint").rglob("*")]
    assert len(places) == 6
    for path in places:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_old_checkpoints_are_removed(tiny: MakeConfig, tmp_path: Path) -> None:
    start_run(tiny("stop.updates=30", "checkpoint.every=5"), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir())
    assert len(kept) == 4
    assert kept[:2] == ["latest", "previous"]


def truncate_tensors(folder: Path) -> None:
    path = latest(folder) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:200])


def cut_json(folder: Path) -> None:
    path = latest(folder) / "state.json"
    path.write_text(path.read_text()[:-100])


def other_format(folder: Path) -> None:
    path = latest(folder) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def drop_server(folder: Path) -> None:
    path = latest(folder) / "state.json"
    document = json.loads(path.read_text())
    document["state"]["map"] = [p for p in document["state"]["map"] if p[0] != "server"]
    path.write_text(json.dumps(document))


def another_model(folder: Path) -> None:
    path = folder / "config.toml"
    text = path.read_text()
    path.write_text(text.replace("    8,\n", "    9,\n"))
    assert path.read_text() != text


def unknown_class(folder: Path) -> None:
    path = latest(folder) / "state.json"
    path.write_text(path.read_text().replace('"type": "Task"', '"type": "Renamed"'))
    sums = json.loads((latest(folder) / "sha256.json").read_text())
    sums["state.json"] = sha256(path.read_bytes()).hexdigest()
    (latest(folder) / "sha256.json").write_text(json.dumps(sums))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated tensors": (truncate_tensors, "damaged"),
    "truncated json": (cut_json, "damaged"),
    "no json": (lambda folder: (latest(folder) / "state.json").unlink(), "damaged"),
    "no tensors": (lambda folder: (latest(folder) / "state.safetensors").unlink(), "damaged"),
    "a list": (lambda folder: (latest(folder) / "state.json").write_text("[]"), "damaged"),
    "another format": (other_format, "format 99, this version reads"),
    "half a state": (drop_server, "checksum"),
    "another model": (another_model, r"other settings: model.hidden = \[8\], now \[9\]; resume"),
    "an unknown class": (unknown_class, "does not fit the code that reads it: 'Renamed'"),
    "empty pointer": (lambda folder: (folder / "checkpoint/latest").write_text(""), "damaged"),
    "binary pointer": (
        lambda folder: (folder / "checkpoint/latest").write_bytes(b"\xff\x00\xfe"),
        "damaged",
    ),
    "lost events": (lambda folder: (folder / "events.jsonl").unlink(), "events.jsonl"),
    "cut metrics": (lambda folder: os.truncate(folder / "metrics.csv", 10), "metrics.csv"),
    "no config": (lambda folder: (folder / "config.toml").unlink(), "no run to resume"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_is_refused(stopped: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    damage(stopped)
    with pytest.raises(BadInput, match=words):
        resume_run(stopped)
    assert not (stopped / "summary.json").exists()


def edit(folder: Path, *settings: str) -> None:
    path = folder / "config.toml"
    path.write_text(load_config(path, settings).to_toml())


def test_a_resume_with_other_settings_lists_them(stopped: Path) -> None:
    """Edits of config.toml are refused, also of what --set may change; with --set it is logged."""
    path, before = stopped / "config.toml", (stopped / "config.toml").read_text()
    for changes, words in {
        ("seed=2", "training.lr=0.5"): ["seed = 1, now 2; training.lr = 0.1, now 0.5; resume"],
        ("stop.updates=44",): ["stop.updates = 40, now 44"],
        ("strategy.name=fedbuff",): ["strategy.name = fedasync, now fedbuff"],
    }.items():
        edit(stopped, *changes)
        with pytest.raises(BadInput) as refused:
            resume_run(stopped)
        assert all(word in str(refused.value) for word in words), refused.value
        path.write_text(before)
    edit(stopped, "seed=2")
    with pytest.raises(BadInput, match="seed = 1, now 2"):  # one that --set does not name
        resume_run(stopped, settings=["stop.updates=44"])
    path.write_text(before)


def test_settings_that_change_on_a_resume_are_logged(stopped: Path) -> None:
    with pytest.raises(Killed):  # before the next checkpoint
        resume_run(stopped, After(0, die), settings=["stop.updates=44", "training.lr = 0.05"])
    summary = resume_run(stopped)
    text = "updates: training.lr = 0.1, now 0.05; stop.updates = 40, now 44"
    assert summary["updates"] == 44
    assert [w for w in summary["warnings"] if text in w]
    events = [json.loads(line) for line in (stopped / "events.jsonl").read_text().splitlines()]
    assert [e for e in events if e["event"] == "resume" and text in e["reason"]]
    config = load_config(stopped / "config.toml")
    assert (config.training.lr, config.stop.updates) == (0.05, 44)
    with pytest.raises(BadInput, match="complete"):
        resume_run(stopped, settings=["stop.updates=50"])


def test_a_half_written_checkpoint_is_ignored(
    tiny: MakeConfig, stopped: Path, tmp_path: Path
) -> None:
    half = stopped / "checkpoint" / "updates-33-9"
    half.mkdir()
    (half / "state.safetensors").write_bytes(b"half")
    (stopped / "checkpoint" / "latest.new").write_text("updates-3")
    start_run(tiny("stop.updates=40"), tmp_path / "whole")
    resume_run(stopped)
    same_files(tmp_path / "whole", stopped)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_finished_run_is_left_as_it_is(tiny: MakeConfig, tmp_path: Path) -> None:
    summary = start_run(tiny(), tmp_path / "run")
    before = snapshot(tmp_path / "run")
    assert resume_run(tmp_path / "run") == summary
    assert snapshot(tmp_path / "run") == before


def test_a_damaged_summary_is_refused(tiny: MakeConfig, tmp_path: Path) -> None:
    start_run(tiny("stop.updates=5"), tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text("{")
    with pytest.raises(BadInput, match=r"summary\.json"):
        resume_run(tmp_path / "run")


# Real processes, really killed.

CONFIG = """
[data]
alpha = 0.5
[fleet]
devices = 10
profile = "phones"
crash = 0.05
dropout = 0.005
[model]
hidden = [8]
[training]
local_epochs = 1
lr = 0.1
[strategy]
name = "fedbuff"
[stop]
updates = 500
[evaluate]
every = 25
[checkpoint]
every = 25
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config and the uninterrupted run of it."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "config.toml").write_text(CONFIG)
    start_run(load_config(folder / "config.toml"), folder / "whole")
    return folder


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "latecomer", "run", *args, "--quiet"]


def stop_when(
    folder: Path, reached: Callable[[], bool], number: signal.Signals, *args: str
) -> tuple[int, str]:
    """Start a run and send it a signal as soon as it has got that far."""
    with subprocess.Popen(
        command(*args), cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not reached():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


def saved_updates(folder: Path) -> int:
    try:
        return int((folder / "checkpoint" / "latest").read_text().split("-")[1])
    except FileNotFoundError:
        return -1


@pytest.mark.slow
def test_sigkill_again_and_again(scenario: Path) -> None:
    """In the first moment, before the first checkpoint; then twice in mid-run."""
    cut = scenario / "killed"
    begun = (cut / "metrics.csv").is_file
    code, _ = stop_when(scenario, begun, signal.SIGKILL, "config.toml", "--out", "killed")
    assert code == -signal.SIGKILL
    assert saved_updates(cut) < 150
    for updates in (150, 300):
        code, _ = stop_when(
            scenario,
            lambda updates=updates: saved_updates(cut) >= updates,
            signal.SIGKILL,
            "--resume",
            "killed",
        )
        assert code == -signal.SIGKILL
        assert not (cut / "summary.json").exists()
    done = subprocess.run(command("--resume", "killed"), cwd=scenario, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"killed\n", b"")
    same_files(scenario / "whole", cut)
    assert (cut / "report.html").is_file()


def test_sigkill_in_mid_run(scenario: Path) -> None:
    cut = scenario / "killed-once"
    code, _ = stop_when(
        scenario,
        lambda: saved_updates(cut) >= 200,
        signal.SIGKILL,
        "config.toml",
        "--out",
        "killed-once",
    )
    assert code == -signal.SIGKILL
    assert not (cut / "summary.json").exists()
    resume_run(cut)
    same_files(scenario / "whole", cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(recipes()) - {"fedbuff"}))
def test_sigkill_for_every_other_recipe(scenario: Path, name: str) -> None:
    config = (scenario / "config.toml").read_text().replace("fedbuff", name)
    (scenario / f"{name}.toml").write_text(config)
    start_run(load_config(scenario / f"{name}.toml"), scenario / f"whole-{name}")
    cut = scenario / f"killed-{name}"
    code, _ = stop_when(
        scenario,
        lambda: saved_updates(cut) >= 100,
        signal.SIGKILL,
        f"{name}.toml",
        "--out",
        f"killed-{name}",
    )
    assert code == -signal.SIGKILL
    assert not (cut / "summary.json").exists()
    resume_run(cut)
    same_files(scenario / f"whole-{name}", cut)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_process_in_order(scenario: Path, number: signal.Signals) -> None:
    name = number.name.lower()
    cut = scenario / name
    code, err = stop_when(
        scenario, lambda: saved_updates(cut) >= 200, number, "config.toml", "--out", name
    )
    assert code == 1
    assert err.startswith("error: interrupted after")
    assert f"latecomer run --resume {name}" in err
    assert err.count("\n") == 1
    resume_run(cut)
    same_files(scenario / "whole", cut)


def test_a_damaged_checkpoint_is_one_line(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (latest(stopped) / "state.json").write_text("{")
    monkeypatch.chdir(stopped.parent)
    monkeypatch.setattr(sys, "argv", ["latecomer", *command("--resume", "stopped")[3:]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("error: stopped/checkpoint/")
    assert err.count("\n") == 1

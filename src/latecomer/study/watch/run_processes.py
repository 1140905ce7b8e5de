"""Starts, pauses, resumes and stops runs as child processes.

Pause ends the process with a checkpoint and continue resumes from it: the result is bit-identical
and a paused run uses no memory.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOP_SECONDS = 60.0  # from SIGTERM to kill


@dataclass
class RunProcess:
    """One child process and its last lines on stderr."""

    folder: Path
    process: "subprocess.Popen[str]"
    requested: str = "run"  # run, pause or stop
    stderr: list[str] = field(default_factory=list)


class RunProcesses:
    """Starts runs as child processes and ends them with a checkpoint."""

    def __init__(self) -> None:
        self._runs: dict[Path, RunProcess] = {}
        self._lock = threading.Lock()

    def start(self, config: Path, folder: Path, settings: Sequence[str]) -> None:
        changes = [part for setting in settings for part in ("--set", setting)]
        self._launch(folder, [str(config), "--out", str(folder), *changes])

    def state(self, folder: Path) -> str | None:
        """running, pausing, paused, stopped or failed; None: finished, or not started here."""
        with self._lock:
            run = self._runs.get(folder)
        if run is None:
            return None
        code = run.process.poll()
        if code is None:
            return "running" if run.requested == "run" else "pausing"
        if (folder / "summary.json").is_file():
            return None
        if run.requested == "run":
            return "failed"
        return "paused" if run.requested == "pause" else "stopped"

    def reason(self, folder: Path) -> str:
        """The last line of the run on stderr."""
        run = self._runs.get(folder)
        return run.stderr[-1] if run and run.stderr else ""

    def pause(self, folder: Path) -> bool:
        return self._end(folder, "pause")

    def stop(self, folder: Path) -> bool:
        if self.state(folder) == "paused":
            self._runs[folder].requested = "stop"
            return True
        return self._end(folder, "stop")

    def resume(self, folder: Path) -> bool:
        if self.state(folder) != "paused":
            return False
        if (folder / "config.toml").is_file():
            self._launch(folder, ["--resume", str(folder)])
            return True
        return False

    def stop_all(self) -> list[Path]:
        """Stops all running processes and waits for them; returns the folders to resume."""
        active = [f for f in self._runs if self.state(f) in ("running", "pausing")]
        for folder in active:
            self._end(folder, "stop")
        for folder in active:
            try:
                self._runs[folder].process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._runs[folder].process.kill()
        return active

    def _end(self, folder: Path, request: str) -> bool:
        if self.state(folder) not in ("running", "pausing"):
            return False
        run = self._runs[folder]
        run.requested = request
        run.process.send_signal(signal.SIGTERM)
        return True

    def _launch(self, folder: Path, arguments: Sequence[str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "latecomer", "run", "--quiet", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C in the terminal goes to the server only, which then stops its runs.
            start_new_session=True,
        )
        run = RunProcess(folder, process)
        with self._lock:
            self._runs[folder] = run
        threading.Thread(target=_read_stderr, args=(run,), daemon=True).start()


def _read_stderr(run: RunProcess) -> None:
    if run.process.stderr is None:
        return
    with run.process.stderr as lines:
        for line in lines:
            run.stderr.append(line.strip())
            del run.stderr[:-20]

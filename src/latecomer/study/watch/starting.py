"""Runs that the page has started: pause, continue and stop go through their checkpoints.

To pause is to end the process after its present step, with a checkpoint, and to continue is to
resume it: the result is the same to the bit, and a paused run needs no memory.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STOPS_WITHIN_SECONDS = 60.0


@dataclass
class Started:
    """One run of ours."""

    folder: Path
    process: "subprocess.Popen[str]"
    wish: str = "run"  # run, pause or stop
    said: list[str] = field(default_factory=list)


class Starter:
    """Starts runs as processes of their own, and ends them gently."""

    def __init__(self) -> None:
        self._runs: dict[Path, Started] = {}
        self._lock = threading.Lock()

    def start(self, config: Path, folder: Path, settings: Sequence[str]) -> None:
        changes = [part for setting in settings for part in ("--set", setting)]
        self._launch(folder, [str(config), "--out", str(folder), *changes])

    def state(self, folder: Path) -> str | None:
        """running, pausing, paused, stopped or failed; None if it is finished or not ours."""
        with self._lock:
            run = self._runs.get(folder)
        if run is None:
            return None
        code = run.process.poll()
        if code is None:
            return "running" if run.wish == "run" else "pausing"
        if (folder / "summary.json").is_file():
            return None
        if run.wish == "run":
            return "failed"
        return "paused" if run.wish == "pause" else "stopped"

    def reason(self, folder: Path) -> str:
        """What a run that failed said last."""
        run = self._runs.get(folder)
        return run.said[-1] if run and run.said else ""

    def pause(self, folder: Path) -> bool:
        return self._end(folder, "pause")

    def stop(self, folder: Path) -> bool:
        if self.state(folder) == "paused":
            self._runs[folder].wish = "stop"
            return True
        return self._end(folder, "stop")

    def go_on(self, folder: Path) -> bool:
        if self.state(folder) != "paused":
            return False
        if (folder / "config.toml").is_file():
            self._launch(folder, ["--resume", str(folder)])
            return True
        return False

    def end_all(self) -> list[Path]:
        """Ask all to end, and wait; gives those that can be resumed."""
        going = [f for f in self._runs if self.state(f) in ("running", "pausing")]
        for folder in going:
            self._end(folder, "stop")
        for folder in going:
            try:
                self._runs[folder].process.wait(STOPS_WITHIN_SECONDS)
            except subprocess.TimeoutExpired:
                self._runs[folder].process.kill()
        return going

    def _end(self, folder: Path, wish: str) -> bool:
        if self.state(folder) not in ("running", "pausing"):
            return False
        run = self._runs[folder]
        run.wish = wish
        run.process.send_signal(signal.SIGTERM)
        return True

    def _launch(self, folder: Path, arguments: Sequence[str]) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "latecomer", "run", "--quiet", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C in the terminal is for the page, which then ends its runs itself.
            start_new_session=True,
        )
        run = Started(folder, process)
        with self._lock:
            self._runs[folder] = run
        threading.Thread(target=_listen, args=(run,), daemon=True).start()


def _listen(run: Started) -> None:
    if run.process.stderr is None:
        return
    with run.process.stderr as lines:
        for line in lines:
            run.said.append(line.strip())
            del run.said[:-20]

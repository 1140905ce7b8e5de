"""A process that is started again when it ends, with exponential back-off."""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from latecomer.deploy.processes import Process, process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackOff:
    """Seconds before a restart, doubled by every end of a process within `healthy` seconds."""

    first: float = 1.0
    longest: float = 15.0
    healthy: float = 60.0

    def after(self, failures: int) -> float:
        return float(min(self.longest, self.first * 2 ** min(failures, 30)))


class Supervised:
    """One command, its log file, and a thread that starts it again whenever it ends.

    The process gets a session of its own, so that Ctrl-C in the terminal reaches only the
    supervisor, which then ends everything in order. Without a log file the process writes to the
    output of the supervisor. `on_change` is called in the thread when a process starts or ends.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path | None,
        environment: Mapping[str, str],
        folder: Path,
        back_off: BackOff | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.command, self.log_file = name, list(command), log_file
        self.environment, self.folder, self.on_change = dict(environment), folder, on_change
        self.back_off = back_off or BackOff()
        self.starts = 0
        self._log_offset = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the running process; None if none runs."""
        popen = self._popen
        return popen.pid if popen is not None and popen.returncode is None else None

    @property
    def process(self) -> Process | None:
        """The running process, with its start time; None if none runs."""
        return self._process if self.pid is not None else None

    def start(self) -> None:
        """Start the process and keep it running; also again after `stop`."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._spawn()
        self._thread = threading.Thread(target=self._watch, name=f"watch-{self.name}", daemon=True)
        self._thread.start()

    def kill(self, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal as a fault would, without a stop; returns the pid."""
        pid = self.pid
        if pid is None:
            raise ProcessLookupError(f"{self.name} does not run at present")
        os.kill(pid, signal_number)
        return pid

    def stop(self, timeout: float = 5.0) -> None:
        """End the process and its children, and do not start it again."""
        self._stop.set()
        if self._thread is None:
            return
        self._signal_group(signal.SIGCONT)
        self._signal_group(signal.SIGTERM)
        self._thread.join(timeout)
        self._signal_group(signal.SIGKILL)
        self._thread.join(timeout)

    def text(self, since_start: bool = False) -> str:
        """The log so far, or since the last start."""
        if self.log_file is None:
            return ""
        try:
            with self.log_file.open("rb") as file:
                file.seek(self._log_offset if since_start else 0)
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _spawn(self) -> None:
        with self._lock, self._output() as output:
            if self._stop.is_set():
                return
            self._log_offset = output.tell() if output is not None else 0
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
            self._process = process(self._popen.pid)
            self.starts += 1
        self.on_change()

    def _output(self) -> contextlib.AbstractContextManager[BinaryIO | None]:
        if self.log_file is None:
            return contextlib.nullcontext()
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        return self.log_file.open("ab")

    def _watch(self) -> None:
        failures = 0
        while self._popen is not None:
            begun = time.monotonic()
            self._await_end(self._popen)
            # Its children. The pid is not yet free, so the group cannot be another one.
            self._signal_group(signal.SIGKILL if self._stop.is_set() else signal.SIGTERM)
            with self._lock:
                code = self._popen.wait()
            if self._stop.is_set():
                return
            if time.monotonic() - begun >= self.back_off.healthy:
                failures = 0
            wait = self.back_off.after(failures)
            failures += 1
            log.warning("%s ended with code %s; again in %.0f s", self.name, code, wait)
            self.on_change()
            if self._stop.wait(wait):
                return
            self._spawn()

    def _await_end(self, popen: "subprocess.Popen[bytes]") -> None:
        """Wait for its end without reaping it, so that its pid is not used again."""
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
            return
        while self._process is not None and self._process.is_alive():
            time.sleep(0.1)

    def _signal_group(self, number: int) -> None:
        """Send a signal to the process and its children, unless it was reaped."""
        with self._lock:
            if self._popen is not None and self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, number)

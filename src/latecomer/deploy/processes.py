"""Identity of processes: a pid with its start time, because pids are used again."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A pid and the start time of the process that had it."""

    pid: int
    started: str

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started

    def state(self) -> str:
        """ "alive", "stopped" (by SIGSTOP; seen where there is a /proc) or "gone"."""
        if not self.is_alive():
            return "gone"
        try:
            stat = PROC.joinpath(str(self.pid), "stat").read_text()
        except OSError:
            return "alive"
        return "stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else "alive"

    def send(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_time(pid: int) -> str | None:
    """When the process with this pid started, as a comparable text; None if there is none."""
    if PROC.joinpath("self", "stat").exists():
        try:
            stat = PROC.joinpath(str(pid), "stat").read_text()
            boot = PROC.joinpath("sys", "kernel", "random", "boot_id").read_text().strip()
        except OSError:
            return None
        # The name, in brackets, may contain anything; 20 fields after it is the start, in ticks.
        rest = stat.rpartition(")")[2].split()
        return None if rest[0] in "ZX" else f"{boot[:8]}-{rest[19]}"
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return None if not found or found[0].startswith("Z") else "-".join(found[1:])


def process(pid: int) -> Process | None:
    """The process that has this pid at present."""
    started = start_time(pid)
    return None if started is None else Process(pid, started)


def with_variable(name: str, value: str) -> Iterator[Process]:
    """The processes that were started with this environment variable, by /proc.

    Includes processes that have left their parent and its group. Empty where there is no /proc.
    """
    variable = f"{name}={value}".encode()
    for folder in PROC.glob("[0-9]*"):
        try:
            has_it = variable in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        pid = int(folder.name)
        found = process(pid) if has_it and pid != os.getpid() else None
        if found is not None:
            yield found


def command_of(one: Process) -> list[str]:
    """The command line of a process, by /proc; empty if it cannot be read."""
    try:
        text = PROC.joinpath(str(one.pid), "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def end(processes: Iterable[Process], timeout: float = 5.0) -> None:
    """Send SIGTERM to all, and SIGKILL to those that are alive after `timeout` seconds."""
    left = [one for one in processes if one.is_alive()]
    for one in left:
        one.send(signal.SIGCONT)  # a stopped process does not receive SIGTERM
        one.send(signal.SIGTERM)
    until = time.monotonic() + timeout
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [one for one in left if one.is_alive()]
    for one in left:
        one.send(signal.SIGKILL)

"""Which process is which: a pid alone may belong to somebody else by now."""

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
    """A pid and the moment at which that process began."""

    pid: int
    began: str

    def is_alive(self) -> bool:
        return began(self.pid) == self.began

    def send(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def began(pid: int) -> str | None:
    """When the process of this pid began, in a text to compare; None if there is none."""
    if PROC.joinpath("self", "stat").exists():
        try:
            stat = PROC.joinpath(str(pid), "stat").read_text()
            boot = PROC.joinpath("sys", "kernel", "random", "boot_id").read_text().strip()
        except OSError:
            return None
        # The name, in brackets, may hold anything; the state and 19 numbers on, the start in ticks.
        rest = stat.rpartition(")")[2].split()
        return None if rest[0] in "ZX" else f"{boot[:8]}-{rest[19]}"
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return None if not found or found[0].startswith("Z") else "-".join(found[1:])


def process(pid: int) -> Process | None:
    """The process that has this pid at present."""
    start = began(pid)
    return None if start is None else Process(pid, start)


def with_variable(name: str, value: str) -> Iterator[Process]:
    """The processes that were started with this variable in their environment.

    Also those that have left their parent and its group. None where there is no /proc.
    """
    mark = f"{name}={value}".encode()
    for folder in PROC.glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or not ours to look into
            continue
        pid = int(folder.name)
        found = process(pid) if marked and pid != os.getpid() else None
        if found is not None:
            yield found


def command_of(one: Process) -> list[str]:
    """What was called, where /proc tells."""
    try:
        text = PROC.joinpath(str(one.pid), "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.split("\0")[:-1]


def end(processes: Iterable[Process], timeout: float = 5.0) -> None:
    """Ask them all to go, and kill those that have not gone by then."""
    left = [one for one in processes if one.is_alive()]
    for one in left:
        one.send(signal.SIGCONT)  # one that is stopped would not hear
        one.send(signal.SIGTERM)
    until = time.monotonic() + timeout
    while left and time.monotonic() < until:
        time.sleep(0.05)
        left = [one for one in left if one.is_alive()]
    for one in left:
        one.send(signal.SIGKILL)

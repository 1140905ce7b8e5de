"""Ends the processes of a federation after its supervisor was killed. Runs as a program."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from latecomer.deploy.folders import PIDS
from latecomer.deploy.pids import SUPERVISOR, PidFile
from latecomer.deploy.processes import Process, end, process, with_variable

FOLDER_VARIABLE = "LATECOMER_FEDERATION"  # in every process of a federation: its folder
CHECK_SECONDS = 0.5


def federation_processes(folder: Path) -> list[Process]:
    """The living processes of the federation in this folder, except its supervisor."""
    listed = PidFile(folder / PIDS).alive()
    listed.pop(SUPERVISOR, None)
    found = [*listed.values(), *with_variable(FOLDER_VARIABLE, str(folder))]
    return list({one.pid: one for one in found}.values())


def start_guard(folder: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a guard over the federation in this folder, supervised by this process."""
    return subprocess.Popen(
        [sys.executable, "-m", "latecomer.deploy.guard", str(os.getpid()), str(folder)],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def guard(supervisor: Process, folder: Path) -> None:
    """Wait until the supervisor is gone, then end what it has left running."""
    while supervisor.is_alive():
        time.sleep(CHECK_SECONDS)
    # In a loop: a process may have started another one just before it ended.
    while left := federation_processes(folder):
        end(left)
    PidFile(folder / PIDS).path.unlink(missing_ok=True)


if __name__ == "__main__":
    watched = process(int(sys.argv[1]))
    if watched is not None:
        guard(watched, Path(sys.argv[2]))

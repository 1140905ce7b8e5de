"""Ends what a federation has left behind when its supervisor was killed. Run as a program."""

import sys
import time
from pathlib import Path

from latecomer.deploy.folders import PIDS
from latecomer.deploy.pids import SUPERVISOR, PidFile
from latecomer.deploy.processes import Process, end, process, with_variable

MARK = "LATECOMER_FEDERATION"  # every process of a federation has its folder in this variable
EVERY_SECONDS = 0.5


def belonging_to(folder: Path) -> list[Process]:
    """The processes of the federation in this folder that are alive, without its supervisor."""
    written = PidFile(folder / PIDS).alive()
    written.pop(SUPERVISOR, None)
    found = [*written.values(), *with_variable(MARK, str(folder))]
    return list({one.pid: one for one in found}.values())


def guard(supervisor: Process, folder: Path) -> None:
    """Wait until the supervisor is gone."""
    while supervisor.is_alive():
        time.sleep(EVERY_SECONDS)
    # What ends may have just started something.
    while left := belonging_to(folder):
        end(left)
    PidFile(folder / PIDS).path.unlink(missing_ok=True)


if __name__ == "__main__":
    watched = process(int(sys.argv[1]))
    if watched is not None:
        guard(watched, Path(sys.argv[2]))

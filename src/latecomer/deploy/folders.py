"""Folders of federations: where they are made, and how another terminal finds them."""

from pathlib import Path

from latecomer.deploy.pids import PidFile
from latecomer.errors import BadInput

RUNS = Path("runs")
PIDS = "processes.json"
MARKER = "federation.json"  # present in every federation's folder


def check_folder(path: Path) -> None:
    """BadInput unless the folder is new, empty, or of an earlier federation."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"--dir {path}: is not a folder")
    if path.exists() and any(path.iterdir()) and not (path / MARKER).exists():
        raise BadInput(f"--dir {path}: is not empty and not of a federation; name another one")


def find_folder(given: Path | None) -> Path:
    """The given folder; else the newest federation under runs/, a running one first."""
    if given is not None:
        if not (given / MARKER).exists():
            raise BadInput(f"--dir {given}: there is no federation in it")
        return given
    found = sorted(RUNS.glob(f"*/{MARKER}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadInput(f"no federation under {RUNS.resolve()}; name its folder with --dir")
    running = [path for path in found if PidFile(path.with_name(PIDS)).alive()]
    return (running or found)[-1].parent

"""Where federations keep their files, and how another terminal finds them."""

from pathlib import Path

from latecomer.deploy.pids import PidFile
from latecomer.errors import BadInput

RUNS = Path("runs")
PIDS = "processes.json"
MARKER = "federation.json"  # tells a federation's folder from any other


def new_folder(app: str) -> Path:
    """runs/deploy-APP with the first number that is free."""
    number = 1
    while (path := RUNS / f"deploy-{app}-{number}").exists():
        number += 1
    return path


def check_folder(path: Path) -> None:
    """A federation may be made there: it is new, empty, or was one before."""
    if path.exists() and not path.is_dir():
        raise BadInput(f"--dir {path}: is not a folder")
    if path.exists() and any(path.iterdir()) and not (path / MARKER).exists():
        raise BadInput(f"--dir {path}: is not empty and not of a federation; name another one")


def find_folder(given: Path | None) -> Path:
    """The folder that was named, else the federation under runs/ that runs, else the newest."""
    if given is not None:
        if not (given / MARKER).exists():
            raise BadInput(f"--dir {given}: there is no federation in it")
        return given
    found = sorted(RUNS.glob(f"*/{MARKER}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadInput(f"no federation under {RUNS.resolve()}; name its folder with --dir")
    running = [path for path in found if PidFile(path.with_name(PIDS)).alive()]
    return (running or found)[-1].parent

"""Finds the runs in a folder, without following links out of it."""

from collections.abc import Iterator
from pathlib import Path

from latecomer.study.results import is_deployed

ALLOWED = (
    "config.toml",
    "metrics.csv",
    "events.jsonl",
    "summary.json",
    "fleet.json",
    "devices.csv",
)
DEPTH = 2
MAX_RUNS = 200


def runs_in(root: Path) -> dict[str, Path]:
    """Name -> folder of every run at or at most DEPTH levels below `root`."""
    base = root.resolve()
    found: dict[str, Path] = {}
    for folder in _folders(base, DEPTH):
        if len(found) >= MAX_RUNS:
            break
        if is_run(folder) and stays_inside(folder, base):
            name = folder.relative_to(base).as_posix()
            found[base.name if name == "." else name] = folder
    return found


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a simulated run (it has a config) or a deployed one (a log)."""
    if is_deployed(folder):
        return True
    # flower/config.toml holds Flower's settings.
    return (folder / "config.toml").is_file() and folder.name != "flower"


def stays_inside(folder: Path, base: Path) -> bool:
    """Whether the files that are read of this run are inside `base` after resolving links."""
    paths = [folder, *(folder / name for name in ALLOWED)]
    return all(path.resolve().is_relative_to(base) for path in paths)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth == 0 or is_run(folder):
        return
    try:
        inner = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return
    for each in inner:
        yield from _folders(each, depth - 1)

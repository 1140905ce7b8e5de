"""Which runs lie in a folder, and which of their files may be read."""

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
MOST_RUNS = 200


def runs_in(root: Path) -> dict[str, Path]:
    """Every run at or below `root`, by its name there. Nothing that a link leads out to."""
    base = root.resolve()
    found: dict[str, Path] = {}
    for folder in _folders(base, DEPTH):
        if len(found) >= MOST_RUNS:
            break
        if is_run(folder) and stays_inside(folder, base):
            name = folder.relative_to(base).as_posix()
            found[base.name if name == "." else name] = folder
    return found


def is_run(folder: Path) -> bool:
    """A simulated run has a config from its first moment, a deployed one a log."""
    if is_deployed(folder):
        return True
    # Flower's own settings are in a file of the same name.
    return (folder / "config.toml").is_file() and folder.name != "flower"


def stays_inside(folder: Path, base: Path) -> bool:
    """Whether all that would be read of this run really lies in the folder."""
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

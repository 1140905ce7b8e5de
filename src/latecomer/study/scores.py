"""Evaluation of a deployed model during its run: metrics.csv in the server's folder."""

import csv
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from latecomer.core.server import Server
from latecomer.study.files import Table

Evaluate = Callable[[Tensor], Mapping[str, float]]


class Scores:
    """Evaluates the newest model of the main lineage, at most once in `every` seconds.

    Pass it to `serve` as `on_commit`, and call `final` after `serve` has returned. When a run is
    resumed, rows of versions that are not in its checkpoint are removed.
    """

    def __init__(self, folder: str | Path, evaluate: Evaluate, every: float = 2.0) -> None:
        self.path, self.evaluate, self.every = Path(folder) / "metrics.csv", evaluate, every
        self._began = time.monotonic()
        self._next = 0.0
        self._table: Table | None = None
        self._written = -1

    def __call__(self, server: Server) -> None:
        if time.monotonic() >= self._next:
            self.final(server)
            self._next = time.monotonic() + self.every

    def final(self, server: Server) -> Mapping[str, float]:
        """Evaluate now, write a row for a new version, and return the metrics."""
        found = self.evaluate(server.model())
        row = {
            "updates": server.accepted,
            "version": server.store.commits,
            "wall_seconds": round(time.monotonic() - self._began, 3),
            **{name: round(float(value), 6) for name, value in found.items()},
        }
        if self._table is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            length = _length_before(self.path, server.store.commits)
            self._began -= _seconds_in(self.path, length)
            row["wall_seconds"] = round(time.monotonic() - self._began, 3)
            self._table = Table(self.path, list(row), length)
        if server.store.commits != self._written:
            self._table.write(row)
            self._written = server.store.commits
        return found


def _length_before(path: Path, version: int) -> int:
    """Length in bytes of the header and the rows of versions below `version`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    rows = csv.DictReader(lines)
    kept = 1
    for row in rows:
        if not (row.get("version") or "").isdigit() or int(row["version"]) >= version:
            break
        kept += 1
    return len("".join(lines[:kept]).encode()) if kept > 1 else 0


def _seconds_in(path: Path, length: int) -> float:
    """`wall_seconds` of the last row in the first `length` bytes; 0 without a row."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        rows = list(csv.DictReader(path.read_bytes()[:length].decode().splitlines()))
        return float(rows[-1]["wall_seconds"])
    return 0.0

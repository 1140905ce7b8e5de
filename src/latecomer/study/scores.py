"""Evaluation of a deployed model during its run: metrics.csv in the server's folder."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
from torch import Tensor

from latecomer.core.server import Server
from latecomer.study.files import Table

Evaluate = Callable[[Tensor], Mapping[str, float]]


class Scores:
    """Evaluates the newest model of the main lineage, at most once in `every` seconds.

    Called after commits; `final` after the run. When a run is resumed, rows of versions that are
    not in its checkpoint are removed.
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
            kept = self._rows_before(server.store.commits)
            self._began -= 0.0 if kept.empty else float(kept["wall_seconds"].iloc[-1])
            row["wall_seconds"] = round(time.monotonic() - self._began, 3)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._table = Table(self.path, list(row))
            for earlier in kept.to_dict("records"):
                self._table.write({name: earlier.get(str(name)) for name in row})
        if server.store.commits != self._written:
            self._table.write(row)
            self._written = server.store.commits
        return found

    def _rows_before(self, version: int) -> pd.DataFrame:
        """The rows of an earlier process up to `version`; empty if there is no such table."""
        try:
            table = pd.read_csv(self.path)
            return table[table["version"] < version].dropna(subset="wall_seconds")
        except (OSError, ValueError, LookupError, TypeError):
            return pd.DataFrame()

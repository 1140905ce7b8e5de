"""Metrics of a deployed run by round: of training, of evaluation on devices and on the server.

A round is as many accepted updates as nodes were connected when the run began.
"""

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from latecomer.core.strategy import Stateful
from latecomer.study.files import write_atomically
from latecomer.study.metric_names import NODES

Number = int | float
Value = Number | Sequence[Number]
Sums = dict[str, list[float]]  # metric -> sum of weight * value, sum of weights


class RoundMetrics(Stateful):
    """Collects metrics by round, and writes those of evaluated rounds to metrics.csv.

    Metrics of devices are means, weighted by their numbers of examples. The file has a row for
    each evaluated round: `updates`, `version`, `wall_seconds`, the metrics on the server, those on
    devices as `client_...` with `client_nodes`, the number of replies, and those of training as
    `train_...`. It is replaced whenever a reply comes, so a row is complete when all replies are
    there. Everything here is part of the run's checkpoint.
    """

    kept = ("per_round", "marks", "server", "nodes", "_updates", "_clients", "_training")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.per_round = 0  # updates; 0 until the number of nodes is known
        self.marks: dict[int, list[float]] = {}  # evaluated round -> updates, version, seconds
        self.server: dict[int, dict[str, Any]] = {}
        self.nodes: dict[int, int] = {}  # replies
        self._updates = 0
        self._clients: dict[int, Sums] = {}
        self._training: dict[int, Sums] = {}

    def round_of(self, updates: int) -> int:
        """The round, from 1, of the update after this many."""
        return updates // max(1, self.per_round) + 1

    def trained(self, examples: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of the next update."""
        number = self.round_of(self._updates)
        self._updates += 1
        _add(self._training.setdefault(number, {}), examples, metrics)

    def evaluated(
        self,
        number: int,
        updates: int,
        version: int,
        seconds: float,
        metrics: Mapping[str, Value] | None,
    ) -> None:
        """Begin the row of a round, with the metrics on the server if there are any."""
        self.marks[number] = [updates, version, round(seconds, 3)]
        if metrics is not None:
            self.server[number] = dict(metrics)
        self.write()

    def evaluated_on_device(self, number: int, examples: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of one device to a round."""
        _add(self._clients.setdefault(number, {}), examples, metrics)
        self.nodes[number] = self.nodes.get(number, 0) + 1
        self.write()

    @property
    def clients(self) -> dict[int, dict[str, float]]:
        """Round -> metrics of the model on devices."""
        return {number: _means(sums) for number, sums in sorted(self._clients.items())}

    @property
    def training(self) -> dict[int, dict[str, float]]:
        """Round -> metrics that devices sent with their updates."""
        return {number: _means(sums) for number, sums in sorted(self._training.items())}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.csv."""
        return [self._row(number) for number in sorted(self.marks)]

    def _row(self, number: int) -> dict[str, Any]:
        updates, version, seconds = self.marks[number]
        row: dict[str, Any] = {"updates": int(updates), "version": int(version)}
        row["wall_seconds"] = seconds
        singles = self.server.get(number, {}).items()
        row |= {name: value for name, value in singles if isinstance(value, int | float)}
        if number in self._clients:
            found = _means(self._clients[number])
            row |= {f"client_{name}": value for name, value in found.items()}
            row[NODES] = self.nodes[number]
        found = _means(self._training.get(number, {}))
        row |= {f"train_{name.removeprefix('train_')}": value for name, value in found.items()}
        return row

    def write(self) -> None:
        """Replace metrics.csv."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        # Metrics of the server first, whichever row they came in.
        names.sort(key=lambda name: name.startswith(("client_", "train_")))
        text = StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({n: _shown(v) for n, v in row.items()})
        write_atomically(self.path, text.getvalue())


def _shown(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _add(sums: Sums, weight: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += weight * value
        entry[1] += weight


def _means(sums: Sums) -> dict[str, float]:
    return {name: total / weight for name, (total, weight) in sums.items()}

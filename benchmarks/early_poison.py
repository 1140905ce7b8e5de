"""One hostile device whose first updates are the first of the run, for several strategies.

`python benchmarks/early_poison.py [updates]` prints the accuracy after that many accepted updates
(400 by default) without attack, and with the hostile device's first five updates scaled by a
factor. "rolled back n" counts roll-backs; "stopped" marks a run that ended early.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from latecomer.core.messages import Task, Update
from latecomer.core.outcomes import Logged
from latecomer.study.config import parse
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment
from latecomer.study.totals import RunTotals

STRATEGIES = (
    "fedasync", "fedbuff", "ca2fl", "echopfl", "latecomer", "fedavg", "semi-async",
    "feddc-fedbuff", "robust-fedbuff",
)  # fmt: skip
FACTORS = (1e3, 1e6, -100.0)
HOSTILE_UPDATES = 5


class HostileTrainer:
    """A trainer in which the device whose update is the first multiplies its first ones."""

    def __init__(self, trainer: Any, factor: float) -> None:
        self.trainer, self.factor = trainer, factor
        self.hostile: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def update(self, task: Task, rebases: Any = ()) -> Update:
        made = self.trainer.update(task, rebases) if rebases else self.trainer.update(task)
        if self.hostile is None:
            self.hostile = task.device
        if task.device != self.hostile or task.number >= HOSTILE_UPDATES or made.delta is None:
            return made
        return replace(made, delta=made.delta * self.factor)


@dataclass(frozen=True)
class Result:
    accuracy: float
    totals: RunTotals
    ended_by: str
    finite: bool


def poisoned(strategy: str, factor: float, updates: int = 400, **tables: Any) -> Result:
    """A run on digits with 10 devices, whose hostile device scales by `factor` (1: honest)."""
    config = parse(
        {
            "fleet": {"devices": 10},
            "strategy": {"name": strategy},
            "stop": {"updates": updates},
            "data": {"alpha": 100.0},
            "training": {"lr": 0.1},
            "engine": {"kernel": "plain"},
            **tables,
        }
    )
    experiment = Experiment(config)
    server = experiment.server()
    engine, totals = experiment.engine(server), RunTotals()
    engine.trainer = HostileTrainer(engine.trainer, factor)

    def note(moment: float, outcome: Logged) -> None:
        totals.add(outcome)

    engine.on_note = note
    ended_by = engine.run(experiment.bounds(server.strategy), lambda: True)
    accuracy = Evaluator(experiment).central(server, engine.now).accuracy
    return Result(accuracy, totals, ended_by, bool(torch.isfinite(server.model()).all()))


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    updates = int(arguments[0]) if arguments else 400
    print("| strategy | clean |", " | ".join(f"x {factor:g}" for factor in FACTORS), "|")
    print("|---|---|" + "---|" * len(FACTORS))
    for strategy in STRATEGIES:
        cells = [f"{poisoned(strategy, 1.0, updates).accuracy:.3f}"]
        for factor in FACTORS:
            found = poisoned(strategy, factor, updates)
            cell = f"{found.accuracy:.3f}, {found.totals.refused} refused"
            if found.totals.rollbacks:
                cell += f", rolled back {found.totals.rollbacks}"
            if found.ended_by != "updates":
                cell += f", stopped: {found.ended_by}"
            cells.append(cell)
        print(f"| `{strategy}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""One hostile device whose updates are the first of the run, for several strategies.

python benchmarks/early_poison.py run [--jobs N] [--strategies a,b]
python benchmarks/early_poison.py table

`run` makes all runs and writes one line for each to docs/studies/early-poison.csv; with
--strategies it replaces the lines of these only. `table` writes the tables of docs/reliability.md
from that file.

Digits on 10 devices with equal mean speed (10 s per task). Device 0 joins `head_start` seconds
before the others. Its first `HOSTILE_UPDATES` updates are changed as `ATTACKS` says, or all of
them. The accuracy of a run is the mean over the models after each of its last `LAST` accepted
updates: with skewed data one update of `fedasync` can change it by 0.3, so that a single model
says where in a fleet pass the run happened to end. References are the same run without attack,
and without device 0, whose data are lost as long as it is in quarantine.
"""

import argparse
import csv
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from latecomer.core.messages import Task, Update
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import VirtualEngine
from latecomer.fleet.fleet import Fleet
from latecomer.study.config import parse
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment
from latecomer.study.totals import RunTotals

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "studies" / "early-poison.csv"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- written by: python benchmarks/early_poison.py table -->"
END = "<!-- end of these tables -->"

STRATEGIES = (
    "fedasync", "fedbuff", "ca2fl", "echopfl", "latecomer", "fedavg", "semi-async",
    "feddc-fedbuff", "robust-fedbuff",
)  # fmt: skip
ALPHAS = (1.0, 0.1)
HEAD_STARTS = {5.0: "half a task", 60.0: "six tasks"}
SEEDS = (1, 2)
DEVICES, HOSTILE, HOSTILE_UPDATES = 10, 0, 5
UPDATES, LAST = 1000, 100
LIMIT = 0.05  # a larger loss of accuracy is printed in bold


def scaled(factor: float) -> Callable[[Update], Update]:
    return lambda made: replace(made, delta=made.delta * factor)


def not_finite(made: Update) -> Update:
    """The first value is NaN, the second infinite."""
    delta = made.delta.clone()
    delta[0], delta[1] = float("nan"), float("inf")
    return replace(made, delta=delta)


def claims_examples(made: Update) -> Update:
    return replace(made, delta=-made.delta, num_examples=10**9)


CLEAN, WITHOUT, ALWAYS = "clean", "without it", "1e9 examples, x -1, all updates"
ATTACKS: dict[str, Callable[[Update], Update]] = {
    "x 1000": scaled(1e3),
    "x -100": scaled(-100.0),
    "x 1e6": scaled(1e6),
    "NaN, inf": not_finite,
    "1e9 examples, x -1": claims_examples,
    ALWAYS: claims_examples,
}


class HostileTrainer(OneByOne):
    """Changes the first updates of the hostile device."""

    def __init__(self, clients: Any, attack: Callable[[Update], Update], updates: float) -> None:
        super().__init__(clients)
        self.attack, self.updates = attack, updates

    def update(self, task: Task, rebases: Any = ()) -> Update:
        made = super().update(task, rebases)
        if task.device != HOSTILE or task.number >= self.updates or made.delta is None:
            return made
        return self.attack(made)


@dataclass(frozen=True)
class Setting:
    strategy: str
    alpha: float
    head_start: float
    seed: int
    attack: str


@dataclass(frozen=True)
class Result(Setting):
    accuracy: float
    refused: int
    quarantines: int
    rollbacks: int
    ended_by: str


def run(setting: Setting, updates: int = UPDATES, **tables: Any) -> Result:
    """One run; `tables` replace those of the config."""
    config = parse(
        {
            "seed": setting.seed,
            "fleet": {"devices": DEVICES, "jitter": 0.2},
            "strategy": {"name": setting.strategy},
            "stop": {"updates": updates},
            "data": {"alpha": setting.alpha},
            "training": {"lr": 0.1},
            "engine": {"kernel": "compiled"},
            **tables,
        }
    )
    experiment, totals = Experiment(config), RunTotals()
    server, evaluator = experiment.server(), Evaluator(experiment)
    trainer, devices = OneByOne(experiment.clients), list(experiment.clients)
    if setting.attack == WITHOUT:
        devices.remove(HOSTILE)
    elif setting.attack != CLEAN:
        count = float("inf") if setting.attack == ALWAYS else HOSTILE_UPDATES
        trainer = HostileTrainer(experiment.clients, ATTACKS[setting.attack], count)
    fleet = joining_later(experiment.fleet, setting.head_start)
    engine = VirtualEngine(server, fleet, trainer, devices)
    engine.on_note = lambda moment, outcome: totals.add(outcome)
    accuracies: dict[int, float] = {}  # accepted updates -> accuracy of the model after them

    def after_step() -> bool:
        if server.accepted > updates - LAST and server.accepted not in accuracies:
            accuracies[server.accepted] = evaluator.central(server, engine.now)["accuracy"]
        return True

    ended_by = engine.run(experiment.bounds(server.strategy), after_step)
    if ended_by != "updates":
        accuracies = {0: evaluator.central(server, engine.now)["accuracy"]}
    mean = sum(accuracies.values()) / len(accuracies)
    return Result(
        **asdict(setting),
        accuracy=round(mean, 4),
        refused=totals.refused,
        quarantines=totals.quarantines,
        rollbacks=totals.rollbacks,
        ended_by=ended_by,
    )


def joining_later(fleet: Fleet, seconds: float) -> Fleet:
    """The fleet whose devices other than the hostile one are reachable from `seconds` on."""
    end = 1e9
    profiles = (
        device if number == HOSTILE else replace(device, windows=((seconds, end),), period=end)
        for number, device in enumerate(fleet.devices)
    )
    return replace(fleet, devices=tuple(profiles))


def one_thread(setting: Setting) -> Result:
    torch.set_num_threads(1)
    return run(setting)


def run_all(strategies: Sequence[str], jobs: int) -> None:
    """Run all settings of these strategies; results of others in the file are kept."""
    columns = (CLEAN, WITHOUT, *ATTACKS)
    settings = [Setting(*each) for each in product(strategies, ALPHAS, HEAD_STARTS, SEEDS, columns)]
    kept = [each for each in read() if each.strategy not in strategies] if RESULTS.exists() else []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for number, found in enumerate(pool.imap(one_thread, settings), 1):
            kept.append(found)
            print(f"{number} of {len(settings)}: {found}", flush=True)
    order = {name: number for number, name in enumerate(STRATEGIES)}
    kept.sort(key=lambda each: order[each.strategy])
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, [field.name for field in fields(Result)], lineterminator="\n")
        lines.writeheader()
        lines.writerows(map(asdict, kept))


def read() -> list[Result]:
    """The lines of the result file."""
    types = {field.name: field.type for field in fields(Result)}
    with RESULTS.open(encoding="utf-8") as file:
        return [
            Result(**{name: types[name](text) for name, text in line.items()})
            for line in csv.DictReader(file)
        ]


def tables(results: Iterable[Result]) -> str:
    """One table per head start: means over seeds, and roll-backs per run in parentheses."""
    results = list(results)
    parts = []
    for head_start, name in HEAD_STARTS.items():
        heads = ["strategy", "alpha", CLEAN, WITHOUT, *ATTACKS]
        lines = [
            f"Head start of {name}:",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        for strategy, alpha in product(STRATEGIES, ALPHAS):
            found = {
                attack: [
                    each
                    for each in results
                    if (each.strategy, each.alpha, each.head_start, each.attack)
                    == (strategy, alpha, head_start, attack)
                ]
                for attack in heads[2:]
            }
            cells = [
                cell(found[attack], found[WITHOUT if attack in (WITHOUT, ALWAYS) else CLEAN])
                for attack in heads[2:]
            ]
            lines.append(f"| {' | '.join([f'`{strategy}`', f'{alpha:g}', *cells])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def cell(runs: Sequence[Result], references: Sequence[Result]) -> str:
    """The mean accuracy; in bold if it is lower than that of the references by `LIMIT`."""
    accuracy = mean_accuracy(runs)
    text = f"{accuracy:.3f}"
    if accuracy < mean_accuracy(references) - LIMIT:
        text = f"**{text}**"
    if rollbacks := sum(each.rollbacks for each in runs):
        text += f" ({rollbacks / len(runs):g})"
    if stopped := sum(each.ended_by != "updates" for each in runs):
        text += f", {stopped} of {len(runs)} stopped"
    return text


def mean_accuracy(runs: Sequence[Result]) -> float:
    return sum(each.accuracy for each in runs) / len(runs)


def write_tables() -> None:
    """Replace the tables of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(read())}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    arguments = parser.parse_args()
    if arguments.command == "run":
        run_all(arguments.strategies.split(","), arguments.jobs)
    else:
        write_tables()


if __name__ == "__main__":
    main()

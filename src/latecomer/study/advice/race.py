"""Short runs that tune learning rates, alike for every strategy, and whole runs that compare."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, isfinite, nan
from pathlib import Path
from statistics import fmean, stdev
from time import process_time
from typing import Any

import pandas as pd

from latecomer.errors import BadInput, Interrupted, RunFailed
from latecomer.strategies.recipe import find_recipe
from latecomer.study.advice.advice import Subject
from latecomer.study.advice.measured import last_part
from latecomer.study.advice.suggestions import Suggestion
from latecomer.study.compare import Cell, run_cell, run_cells, seconds_to
from latecomer.study.config import Tree, merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.files import write_atomically
from latecomer.study.metric_names import need_accuracy
from latecomer.study.results import read_json
from latecomer.study.runner import new_folder
from latecomer.study.summary import objective_summary

# --for -> the column of metrics.csv that is the score, by the main metric of the objective
COLUMNS: Mapping[str, str] = {
    "all": "{}",
    "devices": "client_{}",
    "late": "{}_affected",
}
RATES = tuple(3.0**power for power in (-2, -1, 0, 1, 2))  # times training.lr, for every strategy
TUNE_RATES = tuple(3.0**power for power in (-3, -2, -1, 0, 1, 2, 3))  # of `latecomer tune`
MORE_RATES = 3  # of `latecomer tune`, beyond the smallest or largest one if that is the best
SHORT = 0.25  # of the run: the length of a tuning run
# Shortest run as a multiple of the time until most stragglers have sent an update.
AFTER_FIRST_UPDATE = 2.0

OnScore = Callable[[Cell, float], None]  # a finished run and its score


@dataclass(frozen=True)
class Candidate:
    """A strategy at one learning rate."""

    strategy: Mapping[str, Any]  # the table [strategy]
    lr: float
    configured: bool = False  # the config's strategy, at any rate

    @property
    def name(self) -> str:
        return str(self.strategy["name"])

    def tree(self, base: Mapping[str, Any]) -> Tree:
        """The config with this strategy table and learning rate."""
        return merged({**base, "strategy": dict(self.strategy)}, {"training": {"lr": self.lr}})


@dataclass(frozen=True)
class Entry:
    """Scores of a candidate, one per seed, larger is better; -inf: failed, or target missed."""

    candidate: Candidate
    scores: tuple[float, ...]
    cpu_seconds: float  # per run

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; nan with one seed."""
        return stdev(self.scores) if len(self.scores) > 1 and isfinite(self.mean) else nan


@dataclass(frozen=True)
class Stage:
    """Runs of one length with the same seeds for all; entries from best to worst."""

    name: str  # the folder of its runs
    length: float  # share of the configured run
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class RacePlan:
    """Candidates, run lengths, seeds and score of a race."""

    base: Tree
    candidates: tuple[Candidate, ...]  # every strategy at every rate
    length: float  # of tuning runs
    seeds: tuple[int, ...]  # of the final stage, or of `latecomer tune`
    column: str = "accuracy"  # of metrics.csv: the score
    lower_is_better: bool = False
    target: float | None = None
    refused: tuple[str, ...] = ()  # why suggestions cannot run with this config

    @property
    def strategies(self) -> int:
        return len({c.name for c in self.candidates})

    def cost(self) -> float:
        """Cost of the race, in runs of full length."""
        return self.length * len(self.candidates) + self.strategies * len(self.seeds)


@dataclass(frozen=True)
class RaceResult:
    """The best entry by its mean, and those that it is not ahead of by more than the spread.

    `chosen` is the best if `tied` is empty, else the configured strategy if it is one of them, else
    the one with the least CPU time.
    """

    chosen: Entry
    best: Entry
    second: Entry | None
    margin: float  # over the second: mean of the differences, seed by seed
    spread: float  # their standard deviation; nan with one seed
    tied: tuple[Entry, ...]


def plan_race(
    subject: Subject,
    suggestions: Sequence[Suggestion],
    seeds: Sequence[int],
    score_on: str | None = None,
    target: float | None = None,
    rates: Sequence[float] = RATES,
) -> RacePlan:
    """The configured and the suggested strategies that the config allows, all at the same rates."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput("--seeds: give at least one, and each once")
    tree = {key: value for key, value in subject.tree.items() if key not in ("compare", "study")}
    config = parse(tree)
    recipe, lr = find_recipe(config.strategy.name), config.training.lr
    mine = Candidate({"name": recipe.name, **config.strategy.options}, lr, configured=True)
    asked = [Candidate(each.table, lr) for each in suggestions if each.name != mine.name]
    usable = [] if recipe.pooled or recipe.punctual else [mine]
    experiments, refused = [Experiment(config)] if usable else [], []
    for experiment in experiments:
        need_accuracy(objective_summary(experiment), "the race of strategies")
    for each in asked:
        try:
            experiments.append(Experiment(parse(each.tree(tree))))
            usable.append(each)
        except BadInput as error:
            refused.append(str(error))
    if not usable:
        why = "; ".join(refused) or f"{recipe.name!r} is a reference"
        raise BadInput(f"no strategy can run with this config: {why}")
    resolved = experiments[0].config
    if score_on == "late" and not resolved.fleet.late.classes:
        raise BadInput("--for late: the config has no fleet.late.classes to measure on")
    scoring = experiments[0].scoring
    if score_on is None:
        score_on = "devices" if any(_is_personal(e) for e in experiments) else "all"
    fixed: Tree = {
        "stop": resolved.stop.model_dump(),
        "data": {"drift": resolved.data.drift.model_dump()},
        "privacy": {"tasks": resolved.privacy.tasks},
        "evaluate": {"clients": score_on == "devices" or resolved.evaluate.clients},
    }
    several = tuple(replace(c, lr=float(f"{lr * rate:.2g}")) for c in usable for rate in rates)
    return RacePlan(
        merged(tree, fixed),
        several,
        _length(subject),
        tuple(seeds),
        COLUMNS[score_on].format(scoring.main),
        scoring.lower_is_better,
        target,
        tuple(refused),
    )


def _is_personal(experiment: Experiment) -> bool:
    """Whether devices use different models by design."""
    return experiment.recipe.make(experiment.config.strategy.options).personal


def _length(subject: Subject) -> float:
    """Length of a tuning run; 1 with drift, which a shorter run would not show."""
    scenario = subject.facts.scenario
    if scenario is None or scenario.drift != "none":
        return 1.0
    return round(min(1.0, max(SHORT, AFTER_FIRST_UPDATE * scenario.first_update_after)), 2)


def claim(plan: RacePlan, folder: Path) -> None:
    """Makes the folder of a race; a folder with the same plan is used again."""
    document = json.loads(json.dumps({"race": asdict(plan)}))
    if not (folder / "plan.json").is_file():
        write_atomically(new_folder(folder) / "plan.json", json.dumps(document, indent=2) + "\n")
    elif read_json(folder / "plan.json") != document:
        raise BadInput(f"{folder}: holds another race or comparison; choose another --out")


def race(plan: RacePlan, folder: Path, jobs: int, on_score: OnScore) -> Iterator[Stage]:
    """Yields two stages when their runs have finished; runs finished in `folder` are read.

    Every candidate at every rate in short runs with a seed that is not in `plan.seeds`; then every
    strategy at its best rate in whole runs with all seeds.
    """
    tuning = tune(replace(plan, seeds=(max(plan.seeds) + 1,)), folder, jobs, on_score)
    yield tuning
    best = {entry.candidate.name: entry.candidate for entry in reversed(tuning.entries)}
    final = [c for c in plan.candidates if c in best.values()]
    yield _stage("final", plan, final, 1.0, folder, jobs, on_score)


def tune(plan: RacePlan, folder: Path, jobs: int, on_score: OnScore) -> Stage:
    """Every candidate of the plan in short runs with all of its seeds."""
    return _stage("tuning", plan, plan.candidates, plan.length, folder, jobs, on_score)


def find_rate(plan: RacePlan, folder: Path, jobs: int, on_score: OnScore) -> Stage:
    """The rates of the plan, and further ones while the best is the smallest or largest."""
    stage = tune(plan, folder, jobs, on_score)
    for _ in range(MORE_RATES):
        best, tried = stage.entries[0], [entry.candidate.lr for entry in stage.entries]
        factor = {min(tried): 1 / 3, max(tried): 3.0}.get(best.candidate.lr)
        if factor is None or not isfinite(best.mean):
            break
        beyond = replace(best.candidate, lr=float(f"{best.candidate.lr * factor:.2g}"))
        more = tune(replace(plan, candidates=(beyond,)), folder, jobs, on_score).entries
        ordered = sorted((*stage.entries, *more), key=lambda entry: entry.mean, reverse=True)
        stage = replace(stage, entries=tuple(ordered))
    return stage


def _stage(
    name: str,
    plan: RacePlan,
    candidates: Sequence[Candidate],
    length: float,
    folder: Path,
    jobs: int,
    on_score: OnScore,
) -> Stage:
    place, base, every = folder / name, _shortened(plan.base, length), len(plan.seeds)
    place.mkdir(parents=True, exist_ok=True)
    cells = [
        Cell(f"{c.name} lr {c.lr:g}", seed, {**c.tree(base), "seed": seed})
        for c in candidates
        for seed in plan.seeds
    ]
    found = [(-inf, nan)] * len(cells)  # score, CPU seconds
    for index, summary in run_cells(cells, place, jobs, attempt):
        if "failed" not in summary:
            metrics = place / cells[index].folder / "metrics.csv"
            found[index] = (_score(plan, metrics), summary["cpu_seconds"])
        on_score(cells[index], found[index][0])
    entries = []
    for number, candidate in enumerate(candidates):
        scores, seconds = zip(*found[number * every : (number + 1) * every], strict=True)
        entries.append(Entry(candidate, scores, fmean(seconds)))
    entries.sort(key=lambda entry: entry.mean, reverse=True)
    return Stage(name, length, plan.seeds, tuple(entries))


def attempt(cell: Cell, folder: Path) -> dict[str, Any]:
    """One run with its `cpu_seconds`; a failure is returned in place of the summary."""
    spent, began = folder / cell.folder / "cpu_seconds.json", process_time()
    try:
        summary = run_cell(cell, folder)
    except Interrupted:
        raise
    except RunFailed as error:
        return {"failed": str(error)}
    if not spent.is_file():
        write_atomically(spent, json.dumps({"cpu_seconds": process_time() - began}) + "\n")
    return {**summary, **read_json(spent)}


def _score(plan: RacePlan, metrics: Path) -> float:
    """The score of a run; larger is better."""
    if plan.target is not None:
        seconds = seconds_to(metrics, plan.target, plan.column, plan.lower_is_better)
        return -inf if seconds is None else -seconds
    level = last_part(pd.read_csv(metrics), plan.column)
    if not isfinite(level):
        return -inf
    return -level if plan.lower_is_better else level


def _shortened(tree: Tree, length: float) -> Tree:
    stop = tree["stop"]
    parts: Tree = {
        "updates": ceil(stop["updates"] * length),
        "epochs": ceil(stop["epochs"] * length),
        "virtual_seconds": stop["virtual_seconds"] * length,
    }
    return merged(tree, {"stop": parts})


def race_result(final: Stage) -> RaceResult:
    """The result of the final stage, by the paired differences over seeds."""
    best, *others = final.entries
    tied = tuple(entry for entry in others if not _is_ahead(best, entry))
    chosen = next(
        (entry for entry in (best, *tied) if entry.candidate.configured),
        min((best, *tied), key=lambda entry: entry.cpu_seconds),
    )
    second = others[0] if others else None
    margin, spread = _gap(best, second) if second else (nan, nan)
    return RaceResult(chosen if tied else best, best, second, margin, spread, tied)


def _is_ahead(best: Entry, other: Entry) -> bool:
    """Whether the margin exceeds its spread; True if only `other` failed or missed the target."""
    if isfinite(best.mean) != isfinite(other.mean):
        return True
    margin, spread = _gap(best, other)
    return margin > spread


def _gap(best: Entry, other: Entry) -> tuple[float, float]:
    """Mean and standard deviation of the differences, seed by seed; nan if unknown."""
    gaps = [a - b for a, b in zip(best.scores, other.scores, strict=True)]
    if not all(isfinite(gap) for gap in gaps):
        return nan, nan
    return fmean(gaps), stdev(gaps) if len(gaps) > 1 else nan

"""Races strategies and learning rates by successive halving over run length and seeds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf, isfinite, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from latecomer.errors import BadInput, Interrupted, RunFailed
from latecomer.strategies.recipe import find_recipe
from latecomer.study.advice.measured import last_part
from latecomer.study.advice.remedies import Suggestion, simplicity
from latecomer.study.advice.subject import Subject
from latecomer.study.compare import Cell, run_cell, run_cells, seconds_to
from latecomer.study.config import Tree, merged, parse
from latecomer.study.experiment import Experiment

# --for -> the column of metrics.csv that is the score
COLUMNS: Mapping[str, str] = {
    "all": "accuracy",
    "devices": "client_accuracy",
    "late": "accuracy_affected",
}
RATES = (0.4, 1.0, 2.5)  # times each candidate's learning rate; the step of docs/strategies.md
LENGTHS = (0.25, 0.5, 1.0)  # of the run, at the three rungs
FINALISTS = 2
# Shortest run as a multiple of the time until most stragglers have sent an update.
AFTER_FIRST_UPDATE = 2.0
CONFIGURED = "as configured"

OnScore = Callable[[Cell, float], None]  # a finished run and its score


@dataclass(frozen=True)
class Candidate:
    """A strategy at one learning rate; all learning rates of a strategy have the same label."""

    label: str
    strategy: Mapping[str, Any]
    lr: float

    @property
    def name(self) -> str:
        return str(self.strategy["name"])

    def tree(self, base: Mapping[str, Any]) -> Tree:
        """The config with this strategy table and learning rate."""
        return merged({**base, "strategy": dict(self.strategy)}, {"training": {"lr": self.lr}})


@dataclass(frozen=True)
class Entry:
    """Scores of a candidate at a rung, one per seed, larger is better; -inf: failed."""

    candidate: Candidate
    scores: tuple[float, ...]
    accuracy: float  # breaks ties
    kept: bool = False

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def spread(self) -> float:
        return stdev(self.scores) if len(self.scores) > 1 and isfinite(self.mean) else nan


@dataclass(frozen=True)
class Rung:
    """One step of the race: run length, seeds, and entries from best to worst."""

    length: float
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class RaceResult:
    """The best two of the last rung. `chosen` is the best if its margin exceeds the spread over
    seeds (`decided`), else the simpler of the two."""

    chosen: Candidate
    best: Candidate
    second: Candidate | None
    margin: float  # mean of the differences, seed by seed
    spread: float  # their standard deviation; nan with one seed
    decided: bool


@dataclass(frozen=True)
class RacePlan:
    """Candidates, run lengths, seeds and score of a race."""

    base: Tree
    candidates: tuple[Candidate, ...]
    lengths: tuple[float, ...]
    seeds: tuple[int, ...]
    score_on: str
    target: float | None
    configured: Candidate | None = None  # the config's strategy, always in the last rung
    refused: tuple[str, ...] = ()  # why suggestions cannot run with this config

    def document(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def cost(self) -> float:
        """Upper bound of the cost of the race, in runs of full length."""
        labels = len({c.label for c in self.candidates})
        finalists = min(FINALISTS, labels) + (self.configured is not None)
        counts = (len(self.candidates), _kept(labels), finalists)
        seeds = (1, min(2, len(self.seeds)), len(self.seeds))
        return sum(n * k * x for n, k, x in zip(counts, seeds, self.lengths, strict=True))


def plan_race(
    subject: Subject,
    suggestions: Sequence[Suggestion],
    seeds: Sequence[int],
    score_on: str | None = None,
    target: float | None = None,
) -> RacePlan:
    """The configured and the suggested strategies that the config allows, each at three rates."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput("--seeds: give at least one, and each once")
    tree = {key: value for key, value in subject.tree.items() if key not in ("compare", "study")}
    configured = _configured(tree)
    candidates = [] if configured is None else [configured]
    experiments = [] if configured is None else [Experiment(parse(tree))]
    refused = []
    for each in suggestions:
        if configured is not None and each.name == configured.name:
            continue
        lr = each.lr if each.lr is not None else subject.facts.lr
        candidate = Candidate(each.name, each.table, lr)
        try:
            experiments.append(Experiment(parse(candidate.tree(tree))))
            candidates.append(candidate)
        except BadInput as error:
            refused.append(str(error))
    if not candidates:
        raise BadInput(f"no suggestion can run with this config: {refused[0]}")
    resolved = experiments[0].config
    if score_on == "late" and not resolved.fleet.late.classes:
        raise BadInput("--for late: the config has no fleet.late.classes to measure on")
    if score_on is None:
        personal = any(_is_personal(e) for e in experiments)
        score_on = "devices" if personal else "all"
    fixed: Tree = {
        "stop": resolved.stop.model_dump(),
        "data": {"drift": resolved.data.drift.model_dump()},
        "privacy": {"tasks": resolved.privacy.tasks},
        "evaluate": {"clients": score_on == "devices" or resolved.evaluate.clients},
    }
    several = tuple(
        replace(each, lr=float(f"{each.lr * rate:.2g}")) for each in candidates for rate in RATES
    )
    return RacePlan(
        merged(tree, fixed),
        several,
        _lengths(subject),
        tuple(seeds),
        score_on,
        target,
        configured,
        tuple(refused),
    )


def _is_personal(experiment: Experiment) -> bool:
    """Whether devices use different models by design; `latecomer` forms clusters only if needed."""
    strategy = experiment.recipe.make(experiment.config.strategy.options)
    return strategy.personal and strategy.name != "latecomer"


def _configured(tree: Tree) -> Candidate | None:
    """The config's strategy; None if it is a reference that cannot be deployed."""
    config = parse(tree)
    recipe = find_recipe(config.strategy.name)
    if recipe.pooled or recipe.punctual:
        return None
    table = {"name": config.strategy.name, **config.strategy.options}
    return Candidate(CONFIGURED, table, config.training.lr)


def _lengths(subject: Subject) -> tuple[float, ...]:
    """Run lengths of the rungs; 1 with drift, which a shorter run would not show."""
    scenario = subject.facts.scenario
    if scenario is None or scenario.drift != "none":
        return (1.0,) * len(LENGTHS)
    shortest = min(1.0, AFTER_FIRST_UPDATE * scenario.first_update_after)
    return tuple(max(length, round(shortest, 2)) for length in LENGTHS)


def race(plan: RacePlan, folder: Path, jobs: int, on_score: OnScore) -> Iterator[Rung]:
    """Yields each rung when its runs have finished; runs already finished in `folder` are read."""
    running = list(plan.candidates)
    labels = len({c.label for c in running})
    keep = (_kept(labels), FINALISTS, 1)
    several = (plan.seeds[:1], plan.seeds[:2], plan.seeds)
    for length, seeds, kept in zip(plan.lengths, several, keep, strict=True):
        configured = plan.configured
        if kept == 1 and configured and configured.label not in {c.label for c in running}:
            running.append(configured)
        entries = _ranked(_run(plan, running, length, seeds, folder, jobs, on_score))
        best = list({e.candidate.label: e for e in reversed(entries)}.values())
        best = _ranked(best)[:kept]
        yield Rung(length, seeds, tuple(replace(e, kept=e in best) for e in entries))
        running = [entry.candidate for entry in best]


def _kept(labels: int) -> int:
    """Number of strategies in the second rung."""
    return max(FINALISTS, ceil(labels / 2))


def _run(
    plan: RacePlan,
    candidates: Sequence[Candidate],
    length: float,
    seeds: Sequence[int],
    folder: Path,
    jobs: int,
    on_score: OnScore,
) -> list[Entry]:
    place = folder / f"length-{length:g}"
    place.mkdir(parents=True, exist_ok=True)
    base = _shortened(plan.base, length)
    cells = [
        Cell(f"{c.label} lr {c.lr:g}", seed, {**c.tree(base), "seed": seed})
        for c in candidates
        for seed in seeds
    ]
    found: dict[int, Entry] = {}
    for index, summary in run_cells(cells, place, jobs, attempt):
        candidate, rows = candidates[index // len(seeds)], place / cells[index].folder
        score = (-inf, 0.0) if "failed" in summary else _score(plan, rows / "metrics.csv")
        found[index] = Entry(candidate, score[:1], score[1])
        on_score(cells[index], score[0])
    every = len(seeds)
    return [
        Entry(
            candidate,
            tuple(found[i * every + k].scores[0] for k in range(every)),
            fmean(found[i * every + k].accuracy for k in range(every)),
        )
        for i, candidate in enumerate(candidates)
    ]


def attempt(cell: Cell, folder: Path) -> dict[str, Any]:
    """One run; a failure is returned in place of the summary, so that the race continues."""
    try:
        return run_cell(cell, folder)
    except Interrupted:
        raise
    except RunFailed as error:
        return {"failed": str(error)}


def _score(plan: RacePlan, metrics: Path) -> tuple[float, float]:
    rows = pd.read_csv(metrics)
    level = last_part(rows, COLUMNS[plan.score_on])
    level = level if isfinite(level) else 0.0
    if plan.target is None:
        return level, level
    column = COLUMNS[plan.score_on]
    seconds = seconds_to(metrics, plan.target, column)
    return (-inf if seconds is None else -seconds), level


def _ranked(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: (e.mean, e.accuracy), reverse=True)


def _shortened(tree: Tree, length: float) -> Tree:
    stop = tree["stop"]
    parts: Tree = {
        "updates": ceil(stop["updates"] * length),
        "epochs": ceil(stop["epochs"] * length),
        "virtual_seconds": stop["virtual_seconds"] * length,
    }
    return merged(tree, {"stop": parts})


def race_result(final: Rung) -> RaceResult:
    """The result from the last rung, by the paired differences of the best two over seeds."""
    best, *others = final.entries
    if not others:
        return RaceResult(best.candidate, best.candidate, None, nan, nan, True)
    second = others[0]
    gaps = [a - b for a, b in zip(best.scores, second.scores, strict=True)]
    known = all(isfinite(gap) for gap in gaps)
    margin = fmean(gaps) if known else nan
    spread = stdev(gaps) if known and len(gaps) > 1 else nan
    # If one of them failed or missed the target, the other wins without a spread.
    decided = isfinite(best.mean) if not known else margin > spread
    chosen = best.candidate if decided else min(best.candidate, second.candidate, key=_complexity)
    return RaceResult(chosen, best.candidate, second.candidate, margin, spread, decided)


def _complexity(candidate: Candidate) -> int:
    """The rank by simplicity; the configured strategy comes first."""
    return -1 if candidate.label == CONFIGURED else simplicity(candidate.name)

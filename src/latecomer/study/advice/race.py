"""A short race of candidates: successive halving over seeds, and over the length of runs first."""

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

# whose accuracy a race is for -> its column in metrics.csv
COLUMNS: Mapping[str, str] = {
    "all": "accuracy",
    "devices": "client_accuracy",
    "late": "accuracy_affected",
}
RATES = (0.4, 1.0, 2.5)  # around each candidate's own; the step of docs/strategies.md
LENGTHS = (0.25, 0.5, 1.0)  # of the run, at the three rungs
FINALISTS = 2
# A short run must hear late devices, and go on for as long again.
AFTER_HEARING = 2.0
YOURS = "as configured"

OnCellDone = Callable[[Cell, float], None]  # a run that is done, and its score


@dataclass(frozen=True)
class Candidate:
    """A strategy at one learning rate; `label` is the same for all its rates."""

    label: str
    strategy: Mapping[str, Any]
    lr: float

    @property
    def name(self) -> str:
        return str(self.strategy["name"])

    def tree(self, base: Mapping[str, Any]) -> Tree:
        """The scenario with this strategy, and no other's options."""
        return merged({**base, "strategy": dict(self.strategy)}, {"training": {"lr": self.lr}})


@dataclass(frozen=True)
class Entry:
    """How a candidate did at a rung: one score per seed, the larger the better; -inf: failed."""

    candidate: Candidate
    scores: tuple[float, ...]
    accuracy: float  # decides between those that are equal
    kept: bool = False

    @property
    def mean(self) -> float:
        return fmean(self.scores)

    @property
    def spread(self) -> float:
        return stdev(self.scores) if len(self.scores) > 1 and isfinite(self.mean) else nan


@dataclass(frozen=True)
class Rung:
    """One step of the race, the best first."""

    length: float
    seeds: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Verdict:
    """Who won. Without a margin beyond the spread over seeds nobody did, and `chosen` is the
    simplest of the finalists."""

    chosen: Candidate
    best: Candidate
    second: Candidate | None
    margin: float  # mean of the differences, seed by seed
    spread: float  # their standard deviation; nan with one seed
    decided: bool


@dataclass(frozen=True)
class Plan:
    """What is raced on, and by which measure."""

    base: Tree
    candidates: tuple[Candidate, ...]
    lengths: tuple[float, ...]
    seeds: tuple[int, ...]
    audience: str
    target: float | None
    own: Candidate | None = None  # what is configured; it is in the last rung in any case
    refused: tuple[str, ...] = ()  # suggestions that this config does not allow, and why

    def document(self) -> dict[str, Any]:
        """All of it as plain values: a folder that holds another plan is not this race."""
        return asdict(self)

    def cost(self) -> float:
        """At most so many runs of full length."""
        labels = len({c.label for c in self.candidates})
        finalists = min(FINALISTS, labels) + (self.own is not None)
        counts = (len(self.candidates), _kept(labels), finalists)
        seeds = (1, min(2, len(self.seeds)), len(self.seeds))
        return sum(n * k * x for n, k, x in zip(counts, seeds, self.lengths, strict=True))


def plan_race(
    subject: Subject,
    suggestions: Sequence[Suggestion],
    seeds: Sequence[int],
    audience: str | None = None,
    target: float | None = None,
) -> Plan:
    """The candidates, each at three learning rates, on the subject's scenario; all are checked."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise BadInput("--seeds must name at least one, and none twice")
    tree = {key: value for key, value in subject.tree.items() if key not in ("compare", "study")}
    own = _own(tree)
    candidates = [] if own is None else [own]
    experiments = [] if own is None else [Experiment(parse(tree))]
    refused = []
    for each in suggestions:
        if own is not None and each.name == own.name:
            continue
        lr = each.lr if each.lr is not None else subject.facts.lr
        candidate = Candidate(each.name, each.table, lr)
        try:
            experiments.append(Experiment(parse(candidate.tree(tree))))
            candidates.append(candidate)
        except BadInput as error:
            refused.append(str(error))
    if not candidates:
        raise BadInput(f"none of the suggestions can be run: {refused[0]}")
    resolved = experiments[0].config
    if audience == "late" and not resolved.fleet.late.classes:
        raise BadInput("--for late: the config names no fleet.late.classes to measure on")
    if audience is None:
        personal = any(_is_personal(e) for e in experiments)
        audience = "devices" if personal else "all"
    fixed: Tree = {
        "stop": resolved.stop.model_dump(),
        "data": {"drift": resolved.data.drift.model_dump()},
        "privacy": {"tasks": resolved.privacy.tasks},
        "evaluate": {"clients": audience == "devices" or resolved.evaluate.clients},
    }
    several = tuple(
        replace(each, lr=float(f"{each.lr * rate:.2g}")) for each in candidates for rate in RATES
    )
    return Plan(
        merged(tree, fixed),
        several,
        _lengths(subject),
        tuple(seeds),
        audience,
        target,
        own,
        tuple(refused),
    )


def _is_personal(experiment: Experiment) -> bool:
    """Whether devices are meant to have models of their own; `latecomer` parts them if it must."""
    strategy = experiment.recipe.make(experiment.config.strategy.options)
    return strategy.personal and strategy.name != "latecomer"


def _own(tree: Tree) -> Candidate | None:
    """What the config has, unless it is a reference that no fleet can run."""
    config = parse(tree)
    recipe = find_recipe(config.strategy.name)
    if recipe.pooled or recipe.punctual:
        return None
    table = {"name": config.strategy.name, **config.strategy.options}
    return Candidate(YOURS, table, config.training.lr)


def _lengths(subject: Subject) -> tuple[float, ...]:
    """Parts of the run; the whole where its data change, which a part would not show."""
    scenario = subject.facts.scenario
    if scenario is None or scenario.drift != "none":
        return (1.0,) * len(LENGTHS)
    least = min(1.0, AFTER_HEARING * scenario.heard_after)
    return tuple(max(length, round(least, 2)) for length in LENGTHS)


def race(plan: Plan, folder: Path, jobs: int, told: OnCellDone) -> Iterator[Rung]:
    """Each rung as it is done. Runs that are finished in `folder` are taken as they are."""
    running = list(plan.candidates)
    labels = len({c.label for c in running})
    keep = (_kept(labels), FINALISTS, 1)
    several = (plan.seeds[:1], plan.seeds[:2], plan.seeds)
    for length, seeds, most in zip(plan.lengths, several, keep, strict=True):
        if most == 1 and plan.own and plan.own.label not in {c.label for c in running}:
            running.append(plan.own)
        entries = _ranked(_run(plan, running, length, seeds, folder, jobs, told))
        best = list({e.candidate.label: e for e in reversed(entries)}.values())
        best = _ranked(best)[:most]
        yield Rung(length, seeds, tuple(replace(e, kept=e in best) for e in entries))
        running = [entry.candidate for entry in best]


def _kept(labels: int) -> int:
    """How many strategies go on from the first rung."""
    return max(FINALISTS, ceil(labels / 2))


def _run(
    plan: Plan,
    candidates: Sequence[Candidate],
    length: float,
    seeds: Sequence[int],
    folder: Path,
    jobs: int,
    told: OnCellDone,
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
        told(cells[index], score[0])
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
    """One run; a candidate that cannot be run is out of the race, and does not end it."""
    try:
        return run_cell(cell, folder)
    except Interrupted:
        raise
    except RunFailed as error:
        return {"failed": str(error)}


def _score(plan: Plan, metrics: Path) -> tuple[float, float]:
    rows = pd.read_csv(metrics)
    level = last_part(rows, COLUMNS[plan.audience])
    level = level if isfinite(level) else 0.0
    if plan.target is None:
        return level, level
    column = COLUMNS[plan.audience]
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


def verdict(final: Rung) -> Verdict:
    """From the last rung: the best, or the simplest where seeds differ as much as candidates."""
    best, *others = final.entries
    if not others:
        return Verdict(best.candidate, best.candidate, None, nan, nan, True)
    second = others[0]
    gaps = [a - b for a, b in zip(best.scores, second.scores, strict=True)]
    known = all(isfinite(gap) for gap in gaps)
    margin = fmean(gaps) if known else nan
    spread = stdev(gaps) if known and len(gaps) > 1 else nan
    # One of them failed, or never reached the target: no spread is needed to tell.
    decided = isfinite(best.mean) if not known else margin > spread
    chosen = best.candidate if decided else min(best.candidate, second.candidate, key=_effort)
    return Verdict(chosen, best.candidate, second.candidate, margin, spread, decided)


def _effort(candidate: Candidate) -> int:
    """What is there already is the simplest."""
    return -1 if candidate.label == YOURS else simplicity(candidate.name)

"""`latecomer advise`: findings and suggestions, `--try` races them. `latecomer tune`: one rate."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from latecomer.errors import BadInput, Interrupted, RunFailed
from latecomer.study.advice.advice import Advice, advise, subject, typed, write_document
from latecomer.study.advice.race import (
    COLUMNS,
    TUNE_RATES,
    OnScore,
    RacePlan,
    Stage,
    claim,
    find_rate,
    plan_race,
    race,
    race_result,
)
from latecomer.study.advice.wording import edge_line, lines, race_opening, result_line, score_text
from latecomer.study.advice.wording import stage_table as table_of
from latecomer.study.compare import Cell
from latecomer.study.files import write_atomically
from latecomer.study.results import without_nan
from latecomer.study.runner import new_folder


def advise_on(
    path: Path | None,
    settings: Sequence[str] = (),
    folder: Path | None = None,
    seeds: Sequence[int] | None = None,
    jobs: int = 1,
    target: float | None = None,
    score_on: str | None = None,
    as_json: bool = False,
) -> None:
    """Advice on a config or folder (None: the quickstart); with `seeds`, races the suggestions."""
    if score_on is not None and score_on not in COLUMNS:
        raise BadInput(f"--for {score_on!r}: must be one of {', '.join(COLUMNS)}")
    if seeds is None and (target is not None or score_on is not None):
        raise BadInput("--target and --for are for the race: give --try as well")
    console = Console(quiet=as_json, highlight=False, markup=False, soft_wrap=True)
    found = advise(subject(path, settings))
    for line in lines(found):
        console.print(line)
    document = found.document()
    if seeds is not None and folder is not None:
        plan = plan_race(found.subject, found.suggestions, seeds, score_on, target)
        document = _race(found, plan, folder, jobs, console)
    elif folder is not None:
        write_document(new_folder(folder) / "advice.json", document)
        console.print(f"advice: {folder / 'advice.json'}")
    else:
        again = typed(" ".join(["latecomer advise", *([str(path)] if path else [])]), settings)
        console.print(f"To compare them, all tuned alike: `{again} --try`")
    if as_json:
        print(json.dumps(without_nan(document), indent=2))


def _race(
    advice: Advice, plan: RacePlan, folder: Path, jobs: int, console: Console
) -> dict[str, Any]:
    """Runs both stages; writes advice.json after each, and advice.toml for `latecomer run`."""
    document = {**advice.document(), "stages": [], "result": None}
    claim(plan, folder)
    console.print(f"\n{race_opening(plan)}")
    with _resumable(folder):
        stages: list[Stage] = []
        for stage in race(plan, folder, jobs, _printed(console)):
            stages.append(stage)
            document["stages"].append(asdict(stage))
            write_document(folder / "advice.json", document)
            console.print("", table_of(stage, plan), sep="\n")
    result = race_result(stages[-1])
    document["result"] = asdict(result)
    write_document(folder / "advice.json", document)
    tree = result.chosen.candidate.tree(advice.subject.tree)
    kept = {key: value for key, value in tree.items() if key not in ("compare", "study")}
    write_atomically(folder / "advice.toml", tomli_w.dumps(kept))
    console.print()
    for line in (result_line(result, plan), edge_line(result.chosen, stages[0])):
        if line is not None:
            console.print(line)
    console.print(f"advice: {folder / 'advice.json'}")
    console.print(f"run it: latecomer run {folder / 'advice.toml'}")
    return document


def tune_rate(
    path: Path | None, settings: Sequence[str], folder: Path, seeds: Sequence[int], jobs: int
) -> None:
    """Short runs of the configured strategy over a grid of learning rates; writes tune.json."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = subject(path, settings)
    plan = plan_race(found, (), seeds, "all", rates=TUNE_RATES)
    claim(plan, folder)
    name, rates = plan.candidates[0].name, len(plan.candidates)
    runs = f"{rates} learning rates, {plan.length:.0%} of the run each"
    console.print(f"{name}: {runs}; score: {score_text(plan)}.")
    with _resumable(folder):
        stage = find_rate(plan, folder, jobs, _printed(console))
    best = stage.entries[0]
    document = {"lr": best.candidate.lr, "configured": found.facts.lr, "tuning": asdict(stage)}
    write_document(folder / "tune.json", document)
    console.print("", table_of(stage, plan), sep="\n")
    if not isfinite(best.mean):
        raise RunFailed(
            f"{folder}: every learning rate failed; see the runs in {folder / 'tuning'}"
        )
    setting = f"training.lr={best.candidate.lr:g}"
    console.print(f"\nBest learning rate: {setting} (configured: {found.facts.lr:g})")
    if line := edge_line(best, stage):
        console.print(line)
    console.print(f"results: {folder / 'tune.json'}\nrun it: {typed(found.run, [setting])}")


def _printed(console: Console) -> OnScore:
    def on_score(cell: Cell, score: float) -> None:
        console.print(f"  {cell.strategy}, seed {cell.seed}: {abs(score):.3f}")

    return on_score


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        again = f"interrupted; the same command with `--out {folder}` continues"
        raise Interrupted(again) from stop

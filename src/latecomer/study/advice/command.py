"""`latecomer advise`: prints and writes findings and suggestions; with `--try` races them."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from latecomer.errors import BadInput, Interrupted
from latecomer.study.advice.advice import Race, advise, write_advice
from latecomer.study.advice.race import COLUMNS, plan_race
from latecomer.study.advice.subject import subject, typed
from latecomer.study.advice.wording import (
    configured_line,
    edge_line,
    lines,
    race_opening,
    result_line,
    rung_table,
)
from latecomer.study.compare import Cell
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
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    found = advise(subject(path, settings))
    for line in lines(found):
        console.print(line, markup=False)
    document = found.document()
    if seeds is not None and folder is not None:
        plan = plan_race(found.subject, found.suggestions, seeds, score_on, target)
        document = _race(Race(found, plan, folder), jobs, console)
    elif folder is not None:
        write_advice(new_folder(folder), document)
        console.print(f"advice: {folder / 'advice.json'}", markup=False)
    else:
        again = typed(" ".join(["latecomer advise", *([str(path)] if path else [])]), settings)
        console.print(f"To compare them in short runs: `{again} --try`", markup=False)
    if as_json:
        print(json.dumps(document, indent=2))


def _race(race: Race, jobs: int, console: Console) -> dict[str, object]:
    def on_score(cell: Cell, score: float) -> None:
        console.print(f"  {cell.strategy}, seed {cell.seed}: {abs(score):.3f}", markup=False)

    console.print()
    console.print(race_opening(race.plan), markup=False)
    try:
        for number, rung in enumerate(race.run(jobs, on_score), 1):
            console.print()
            console.print(rung_table(number, rung, race.plan))
            console.print()
    except (Interrupted, KeyboardInterrupt) as stop:
        raise Interrupted(
            f"interrupted; the same command with `--out {race.folder}` resumes the race"
        ) from stop
    found = race.finish()
    console.print(result_line(found, race.plan), markup=False)
    for line in (configured_line(race.rungs[-1], race.plan), edge_line(found, race.plan)):
        if line is not None:
            console.print(line, markup=False)
    console.print(
        f"advice: {race.folder / 'advice.json'}\nrun it: latecomer run"
        f" {race.folder / 'advice.toml'}",
        markup=False,
    )
    return race.document()

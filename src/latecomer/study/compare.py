"""Runs one scenario (data, partition, fleet, delays) under several strategies and seeds."""

import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pandas as pd
import tomli_w

from latecomer.core.strategy import Strategy
from latecomer.device.objective import Kind
from latecomer.errors import BadInput, Interrupted, RunFailed, did_you_mean
from latecomer.loading import first_line
from latecomer.strategies.parts.flower_rounds import FlowerStrategy
from latecomer.strategies.recipe import Build, recipes
from latecomer.study.config import Config, Tree, merged, parse, read_toml
from latecomer.study.experiment import Experiment
from latecomer.study.files import write_atomically
from latecomer.study.given import Given, how_to_resume
from latecomer.study.metric_names import METRICS, SHARES, MainMetric, label_of
from latecomer.study.results import flatten, read_json, without_nan
from latecomer.study.runner import new_folder, resume_run, start_run

# Column of compare.csv -> heading, after those of the metrics.
SHOWN = {
    "seconds_to_target": "s to target",
    "virtual_seconds": "virtual s",
    "updates": "updates",
    "staleness_mean": "staleness",
}

# Metrics of a classification that have a column.
OF_CLASSES = {"accuracy": "accuracy", "macro_f1": "macro-F1", "accuracy_affected": "late-class"}


def comparison_metric(table: pd.DataFrame) -> MainMetric:
    """The main metric of the first run of a comparison."""
    if "objective_metric" not in table or table["objective_metric"].isna().all():
        return MainMetric()
    first = table[table["objective_metric"].notna()].iloc[0]
    return MainMetric(str(first["objective_metric"]), bool(first["objective_lower_is_better"]))


def shown_columns(table: pd.DataFrame) -> dict[str, str]:
    """Columns of compare.csv in the order of a table, the main metric first -> heading."""
    main = comparison_metric(table).name
    if main in OF_CLASSES and "objective_kind" not in table:
        found = dict(OF_CLASSES)
    else:
        kinds = table["objective_kind"].dropna().unique()
        names = [name for kind in kinds for name in METRICS[cast(Kind, kind)]]
        found = {name: label_of(name) for name in (main, *names, "loss")}
    local = ("", " worst", " late")
    columns = (f"client_{main}_{which}" for which in ("mean", "worst", "late_mean"))
    found |= {column: f"local{which}" for column, which in zip(columns, local, strict=True)}
    return found | SHOWN


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: its strategy label, seed and config."""

    strategy: str
    seed: int
    tree: Tree

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._-]', '.', self.strategy)}-seed{self.seed}"

    def config(self) -> Config:
        return parse(self.tree, f"strategy {self.strategy}")


AnyStrategy = Strategy | FlowerStrategy | Build  # of Python, in place of a name
OnRunDone = Callable[[Cell, Mapping[str, Any]], None]  # the run and its summary
RunCell = Callable[[Cell, Path], dict[str, Any]]  # runs in a folder, returns the summary


def cells(tree: Mapping[str, Any], strategies: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every strategy with every seed; `[compare.LABEL]` in the config overrides it for a label."""
    configured = parse(tree).strategy.name
    overrides, table = tree.get("compare", {}), tree.get("strategy", {})
    _check_labels(overrides, strategies)
    found = []
    for label in strategies:
        changes = overrides.get(label, {})
        name = _strategy_named(changes) or label
        # The options in [strategy] apply to the strategy named there only.
        options = table if configured == name else {}
        base = {**tree, "strategy": {**options, "name": name}}
        for seed in seeds:
            cell = {**merged(base, changes), "seed": seed}
            cell.pop("compare", None)
            cell.pop("study", None)
            found.append(Cell(label, seed, cell))
    return found


def _check_labels(overrides: Mapping[str, Any], strategies: Sequence[str]) -> None:
    """Raises BadInput for a `[compare.LABEL]` that cannot be a strategy; unused ones are fine."""
    for label, changes in overrides.items():
        name = str(_strategy_named(changes) or label)
        if label not in strategies and name not in recipes() and ":" not in name:
            near = did_you_mean(label, strategies)
            raise BadInput(
                f"[compare.{label}]: neither a strategy nor in --strategies{near}"
                " (a label of your own needs strategy = { name = ... })"
            )


def _strategy_named(changes: Mapping[str, Any]) -> Any:
    strategy = changes.get("strategy")
    return strategy.get("name") if isinstance(strategy, Mapping) else None


def compare(
    tree: Mapping[str, Any],
    strategies: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    jobs: int = 1,
    target: float | None = None,
    on_run_done: OnRunDone = lambda cell, summary: None,
    on_note: Callable[[str], None] = lambda note: None,
    given: Given | None = None,
    objects: Mapping[str, AnyStrategy] | None = None,
) -> pd.DataFrame:
    """Runs every strategy and seed in a folder each; writes compare.csv and compare.json.

    `on_note` gets the notes from setting up the first seed, one text for strategies that share it.
    `given` are the Python objects of all runs, `objects` the strategies that are objects, by label.
    """
    if not strategies or not seeds:
        raise BadInput("a comparison needs at least one strategy and one seed")
    if len(set(strategies)) != len(strategies) or len(set(seeds)) != len(seeds):
        raise BadInput("--strategies and --seeds: an entry occurs twice")
    planned = cells(tree, strategies, seeds)
    run = _cell_runner(given, objects or {}, jobs)
    notes: dict[str, list[str]] = {}
    for cell in planned[:: len(seeds)]:
        # All configs are checked before the first run.
        experiment = Experiment(cell.config(), (objects or {}).get(cell.strategy), given)
        _check_target(target, experiment.scoring.main)
        for note in experiment.notes:
            notes.setdefault(note, []).append(cell.strategy)
    new_folder(folder)
    for note, labels in notes.items():
        # Some notes begin with the name of the strategy.
        named = len(labels) == len(strategies) or note.split()[0].rstrip(":") == labels[0]
        on_note(note if named else f"{', '.join(labels)}: {note}")
    plan = {"strategies": list(strategies), "seeds": list(seeds), "target": target}
    write_atomically(folder / "plan.json", json.dumps(plan) + "\n")
    # Not config.toml: that would make the folder look like a run that can be resumed.
    write_atomically(folder / "compare.toml", tomli_w.dumps(tree))
    with _resumable(folder, given, objects):
        return _run_all(planned, folder, jobs, target, on_run_done, run)


def _check_target(target: float | None, metric: str) -> None:
    if target is not None and metric in SHARES and not 0 <= target <= 1:
        raise BadInput(f"--target {target:g}: {label_of(metric)} is between 0 and 1")


def resume_comparison(
    folder: Path,
    jobs: int = 1,
    on_run_done: OnRunDone = lambda cell, summary: None,
    given: Given | None = None,
    objects: Mapping[str, AnyStrategy] | None = None,
) -> pd.DataFrame:
    """Finishes an interrupted comparison: finished runs are read, the others run or resumed.

    What was given in Python at the start must be given again.
    """
    if not (folder / "plan.json").is_file() or not (folder / "compare.toml").is_file():
        raise BadInput(f"{folder}: no comparison to resume here (it has no compare.toml)")
    plan, tree = read_json(folder / "plan.json"), read_toml(folder / "compare.toml")
    planned = cells(tree, plan["strategies"], plan["seeds"])
    run = _cell_runner(given, objects or {}, jobs)
    with _resumable(folder, given, objects):
        return _run_all(planned, folder, jobs, plan["target"], on_run_done, run)


@contextmanager
def _resumable(
    folder: Path, given: Given | None, objects: Mapping[str, AnyStrategy] | None
) -> Iterator[None]:
    """The message of an interruption names the comparison to continue, not one of its runs."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        in_python = bool(objects) or not (given or Given()).is_empty
        again = how_to_resume(folder, in_python, "compare")
        raise Interrupted(f"interrupted; continue with {again}") from stop


def _run_all(
    planned: Sequence[Cell],
    folder: Path,
    jobs: int,
    target: float | None,
    on_run_done: OnRunDone,
    run: RunCell,
) -> pd.DataFrame:
    summaries: dict[int, dict[str, Any]] = {}
    for index, summary in run_cells(planned, folder, jobs, run):
        summaries[index] = summary
        on_run_done(planned[index], summary)
    return write_comparison(folder, [(c, summaries[i]) for i, c in enumerate(planned)], target)


def write_comparison(
    folder: Path, runs: Sequence[tuple[Cell, Mapping[str, Any]]], target: float | None
) -> pd.DataFrame:
    """Writes compare.csv and compare.json; `target` None: within 5% of the best mean score."""
    rows = []
    for cell, summary in runs:
        row = {"strategy": cell.strategy, "seed": cell.seed, **flatten(dict(summary))}
        row["strategy"] = cell.strategy
        rows.append(row)
    table = pd.DataFrame(rows)
    main = comparison_metric(table)
    if target is None:
        target = default_target(table.groupby("strategy")[main.name].mean(), main)
    table["seconds_to_target"] = [
        seconds_to(folder / cell.folder / "metrics.csv", target, main.name, main.lower_is_better)
        for cell, _ in runs
    ]
    table.attrs["target"] = target
    write_atomically(folder / "compare.csv", table.to_csv(index=False))
    document = {
        f"target_{main.name}": target,
        "runs": [{"strategy": c.strategy, "seed": c.seed, "folder": c.folder} for c, _ in runs],
        "table": json.loads(spread(table).to_json(orient="index")),
    }
    write_atomically(folder / "compare.json", json.dumps(without_nan(document), indent=2) + "\n")
    return table


def default_target(means: "pd.Series[float]", main: MainMetric) -> float:
    """A score within 5% of the best mean."""
    if main.lower_is_better:
        best = float(means.min())
        return float(f"{best + 0.05 * abs(best):.4g}")
    return float(round(0.95 * means.max(), 3))


def seconds_to(
    metrics: Path, target: float, column: str = "accuracy", lower_is_better: bool = False
) -> float | None:
    """Virtual seconds until `column` of metrics.csv first reached `target`; None: not reached."""
    rows = pd.read_csv(metrics)
    found = MainMetric(column, lower_is_better).reached(rows[column], target)
    reached = rows.loc[found, "virtual_seconds"]
    return float(reached.iloc[0]) if len(reached) else None


def spread(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds, one row per strategy in the order given.

    A column that is empty for some seed (target not reached) has no mean for that strategy.
    """
    columns = [c for c in shown_columns(table) if c in table and table[c].notna().any()]
    groups = table.groupby("strategy", sort=False)[columns]
    complete = groups.count().eq(groups.size(), axis=0)
    mean, std = groups.mean().where(complete), groups.std().where(complete)
    result = mean.add_suffix("_mean").join(std.add_suffix("_std"))
    result["seeds"] = table.groupby("strategy", sort=False).size()
    return result


def legend(columns: Iterable[str], target: float | None, main: MainMetric | None = None) -> str:
    """Explains the headings of these columns and the target."""
    main = main or MainMetric()
    explained = {
        "accuracy_affected": "late-class: accuracy on fleet.late.classes",
        f"client_{main.name}_mean": (
            f"local: local test {main.label} (mean, worst device, late devices)"
        ),
    }
    parts = [explained[column] for column in columns if column in explained]
    bound = " or less" if main.lower_is_better else ""
    return "; ".join(
        parts if target is None else [*parts, f"target: {main.label} {target:g}{bound}"]
    )


def cell_text(mean: float, std: float) -> str:
    """`mean ± std` with digits by magnitude; "-" without a mean."""
    if pd.isna(mean):
        return "-"
    digits = 3 if abs(mean) < 10 else 1 if abs(mean) < 1000 else 0
    text = f"{mean:,.{digits}f}"
    return text if pd.isna(std) else f"{text} ± {std:,.{digits}f}"


def run_cells(
    planned: Sequence[Cell], folder: Path, jobs: int, run: RunCell | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Runs each cell in a folder each; yields (index, summary) as they finish."""
    run = run or run_cell
    if jobs == 1:
        yield from ((index, run(cell, folder)) for index, cell in enumerate(planned))
        return
    # Spawned, not forked: a forked torch can hang in its thread pool.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_end_with, initargs=(os.getpid(),)
    ) as pool:
        futures = {pool.submit(run, c, folder): i for i, c in enumerate(planned)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise RunFailed("a worker process was killed (out of memory?)") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with(parent: int) -> None:
    """Ends this worker process when its parent process has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def run_cell(
    cell: Cell,
    folder: Path,
    given: Given | None = None,
    objects: Mapping[str, AnyStrategy] | None = None,
) -> dict[str, Any]:
    """Runs the cell in its folder, or resumes it there; returns its summary."""
    place, strategy = folder / cell.folder, (objects or {}).get(cell.strategy)
    if (place / "config.toml").is_file():
        return resume_run(place, None, strategy, given)
    return start_run(cell.config(), place, None, strategy, given)


def _cell_runner(given: Given | None, objects: Mapping[str, AnyStrategy], jobs: int) -> RunCell:
    """`run_cell` with the objects given in Python; BadInput if other processes cannot get them."""
    run = partial(run_cell, given=given, objects=objects)
    if jobs > 1:
        try:
            ForkingPickler.dumps(run)
        except Exception as error:  # whatever a user's object raises
            raise BadInput(
                f"jobs = {jobs}: the objects given cannot be copied to other processes"
                f" ({first_line(error)}); put functions into a module, give strategies as functions"
                " that make them, or use jobs = 1"
            ) from error
    return run

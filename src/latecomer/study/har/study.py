"""`latecomer study har`: executes the runs of the plan and writes results, findings and report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.errors import BadInput
from latecomer.study.compare import Cell, run_cells
from latecomer.study.config import merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.files import write_atomically
from latecomer.study.har.findings import DECISIONS, findings, markdown
from latecomer.study.har.page import (
    convergence_panel,
    feature_panel,
    label_panel,
    skew_panel,
    study_page,
)
from latecomer.study.har.plan import Plan, make_plan, scenario
from latecomer.study.har.scores import at_equal_updates, base_curves, factor_curves, results_table
from latecomer.study.har.skew import by_device, feature_skew, label_counts, most_skewed
from latecomer.study.har.takeaways import StudyResults
from latecomer.study.results import read_json
from latecomer.study.runner import new_folder

RUNS = "runs"
PLOTTED_FACTORS = ("augment", "scale", "optimizer", "server_delay", "strategy")
UPDATES = ("updates", "client updates")
TIME = ("virtual_seconds", "virtual time (s)")

OnRunDone = Callable[[Cell, Mapping[str, Any], int, int], None]  # run, summary, done, total


@dataclass(frozen=True)
class HarStudy:
    """The folder of a finished study, and the contents of its main files."""

    folder: Path
    table: pd.DataFrame  # results.csv
    equal: pd.DataFrame  # equal.csv
    text: str  # findings.md


def run_har(
    tree: Mapping[str, Any],
    seeds: Sequence[int],
    folder: Path,
    jobs: int = 1,
    quick: bool = False,
    on_run_done: OnRunDone = lambda cell, summary, done, total: None,
) -> HarStudy:
    """Execute the study in `folder`, skip runs that are already finished, and write its files."""
    if len(set(seeds)) != len(seeds) or not seeds:
        raise BadInput("--seeds must have at least one seed, and no seed twice")
    plan = make_plan(tree, quick)
    _open_folder(folder, tree, quick)
    cells = plan.cells(seeds)
    for done, (index, summary) in enumerate(run_cells(cells, folder / RUNS, jobs), 1):
        on_run_done(cells[index], summary, done, len(cells))
    return write_study(plan, seeds, folder, tree)


def _open_folder(folder: Path, tree: Mapping[str, Any], quick: bool) -> None:
    """Create the folder, or check that its plan.json is of the same config."""
    content = {"study": "har", "quick": quick, "config": tree}
    if not (folder / "plan.json").is_file():
        new_folder(folder)
        write_atomically(folder / "plan.json", json.dumps(content, indent=2) + "\n")
    elif read_json(folder / "plan.json") != json.loads(json.dumps(content)):
        raise BadInput(f"{folder}: holds a study of another config; choose another --out")
    (folder / RUNS).mkdir(exist_ok=True)


def write_study(
    plan: Plan, seeds: Sequence[int], folder: Path, tree: Mapping[str, Any]
) -> HarStudy:
    """Write results.csv, equal.csv, labels.csv, skew.csv, findings.md and report.html."""
    experiment = _experiment(tree, seeds[0])
    counts = label_counts(experiment.federation)
    totals = counts.sum()
    rarest = str(totals[totals > 0].idxmin())
    runs = folder / RUNS
    table = results_table(plan, seeds, runs, rarest)
    equal = at_equal_updates(plan, seeds, runs)
    scaled = _experiment(tree, seeds[0], scale="global").federation
    skew = feature_skew(scaled)
    local = feature_skew(_experiment(tree, seeds[0], scale="local").federation)
    absent = _absent_classes(plan, seeds)
    results = StudyResults(plan, seeds, table, equal, rarest, skew, local, absent)
    source = Path(experiment.config.data.path).stem or experiment.config.data.source
    title = f"Centralised, synchronous, asynchronous: {source}"
    blocks = findings(title, experiment.notes, results)
    text = markdown(blocks)
    write_atomically(folder / "results.csv", table.to_csv(index=False))
    write_atomically(folder / "equal.csv", equal.to_csv(index=False))
    write_atomically(folder / "labels.csv", counts.to_csv(index_label="device"))
    write_atomically(folder / "skew.csv", _skew_csv(skew.by_class, local.by_class, totals))
    write_atomically(folder / "findings.md", text)
    by_paradigm = base_curves(plan, seeds, runs)
    panels = [
        convergence_panel(by_paradigm, UPDATES, "Paradigms", "macro_f1"),
        convergence_panel(by_paradigm, TIME, "Paradigms", "macro_f1"),
        convergence_panel(by_paradigm, UPDATES, "Paradigms", f"f1_{rarest}"),
        label_panel(counts),
        skew_panel(skew, local),
    ]
    label = list(counts.columns).index(rarest)
    if (feature := most_skewed(scaled, skew, label)) is not None:
        values = by_device(scaled, label, feature)
        panels.append(feature_panel(values, f"feature {feature} of {rarest}, its most skewed one"))
    panels += [
        convergence_panel(curves, UPDATES, f"Asynchronous, {DECISIONS[factor]}", "macro_f1")
        for factor in PLOTTED_FACTORS
        if (curves := factor_curves(plan, seeds, runs, factor))
    ]
    write_atomically(folder / "report.html", study_page(blocks, panels))
    return HarStudy(folder, table, equal, text)


def _experiment(tree: Mapping[str, Any], seed: int, **data: str) -> Experiment:
    """The scenario of the study with a seed and changed keys of `[data]`."""
    return Experiment(parse(merged(scenario(tree), {"seed": seed, "data": data})))


def _absent_classes(plan: Plan, seeds: Sequence[int]) -> dict[str, list[str]]:
    """data.test -> names of the classes that the central test set of some seed lacks."""
    variants = {v.tree.get("data", {}).get("test", "fair"): v for v in plan.variants}
    return {
        test: sorted(
            {
                name
                for seed in seeds
                for name in Experiment(variant.cell(seed).config()).federation.absent_classes
            }
        )
        for test, variant in variants.items()
    }


def _skew_csv(
    skew: Mapping[str, float], local: Mapping[str, float], totals: "pd.Series[int]"
) -> str:
    """One row per class: examples, and feature skew under global and local scaling."""
    rows = [
        {"class": name, "examples": totals[name], "global": skew[name], "local": local[name]}
        for name in skew
    ]
    return pd.DataFrame(rows).to_csv(index=False)

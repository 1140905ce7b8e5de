"""`latecomer study har`: run what the plan says, then write results, findings and report."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.errors import BadInput
from latecomer.study.compare import Cell, run_cells
from latecomer.study.config import Tree, parse
from latecomer.study.experiment import Experiment
from latecomer.study.files import write_atomically
from latecomer.study.har.findings import Facts, findings
from latecomer.study.har.page import (
    boxes,
    convergence,
    factor_title,
    labels,
    page,
    skews,
)
from latecomer.study.har.plan import Plan, make_plan
from latecomer.study.har.scores import at_equal_updates, base_curves, factor_curves, tidy
from latecomer.study.har.skew import by_device, feature_skew, label_counts, most_skewed
from latecomer.study.har.takeaways import Evidence
from latecomer.study.results import read_json
from latecomer.study.runner import new_folder

RUNS = "runs"
PLOTTED = ("augment", "scale", "optimizer", "server_delay", "strategy")
UPDATES = ("updates", "client updates")
TIME = ("virtual_seconds", "virtual time (s)")

OnCellDone = Callable[
    [Cell, Mapping[str, Any], int, int], None
]  # run, summary, how many done, of all


@dataclass(frozen=True)
class HarStudy:
    """What a finished study has written, and its main table."""

    folder: Path
    table: pd.DataFrame
    equal: pd.DataFrame
    text: str


def run_har(
    tree: Mapping[str, Any],
    seeds: Sequence[int],
    folder: Path,
    jobs: int = 1,
    quick: bool = False,
    told: OnCellDone = lambda cell, summary, done, of: None,
) -> HarStudy:
    """Run the study in `folder`; there, runs that are finished are taken as they are."""
    if len(set(seeds)) != len(seeds) or not seeds:
        raise BadInput("--seeds must name at least one, and none twice")
    plan = make_plan(tree, quick)
    _open(folder, tree, quick)
    cells = plan.cells(seeds)
    for done, (index, summary) in enumerate(run_cells(cells, folder / RUNS, jobs), 1):
        told(cells[index], summary, done, len(cells))
    return write_study(plan, seeds, folder, tree)


def _open(folder: Path, tree: Mapping[str, Any], quick: bool) -> None:
    """A new folder, or one that holds a part of this very study."""
    asked = {"study": "har", "quick": quick, "config": tree}
    if not (folder / "plan.json").is_file():
        new_folder(folder)
        write_atomically(folder / "plan.json", json.dumps(asked, indent=2) + "\n")
    elif read_json(folder / "plan.json") != json.loads(json.dumps(asked)):
        raise BadInput(f"{folder}: holds a study of another config; choose another --out")
    (folder / RUNS).mkdir(exist_ok=True)


def write_study(
    plan: Plan, seeds: Sequence[int], folder: Path, tree: Mapping[str, Any]
) -> HarStudy:
    """results.csv, equal.csv, findings.md and report.html from finished runs."""
    experiment = _laid_out(tree, seeds[0], {})
    counts = label_counts(experiment.federation)
    totals = counts.sum()
    rarest = str(totals[totals > 0].idxmin())
    runs = folder / RUNS
    table = tidy(plan, seeds, runs, rarest)
    equal = at_equal_updates(plan, seeds, runs)
    scaled = _laid_out(tree, seeds[0], {"scale": "global"}).federation
    skew = feature_skew(scaled)
    local = feature_skew(_laid_out(tree, seeds[0], {"scale": "local"}).federation)
    found = Evidence(plan, table, rarest, skew, local, _missing(plan, seeds, runs))
    source = Path(experiment.config.data.path).stem or experiment.config.data.source
    title = f"Centralised, synchronous, asynchronous: {source}"
    facts = Facts(title, plan.devices, plan.rounds, seeds, experiment.notes, equal)
    text = findings(facts, found)
    write_atomically(folder / "results.csv", table.to_csv(index=False))
    write_atomically(folder / "equal.csv", equal.to_csv(index=False))
    write_atomically(folder / "labels.csv", counts.to_csv(index_label="device"))
    write_atomically(folder / "skew.csv", _skews(skew.by_class, local.by_class, totals))
    write_atomically(folder / "findings.md", text)
    ways = base_curves(plan, seeds, runs)
    figures = [
        convergence(ways, UPDATES, "Ways of learning", "macro_f1"),
        convergence(ways, TIME, "Ways of learning", "macro_f1"),
        convergence(ways, UPDATES, "Ways of learning", f"f1_{rarest}"),
        labels(counts),
        skews(skew, local),
    ]
    label = list(counts.columns).index(rarest)
    if (feature := most_skewed(scaled, skew, label)) is not None:
        values = by_device(scaled, label, feature)
        figures.append(boxes(values, f"feature {feature} of {rarest}, its most skewed one"))
    figures += [
        convergence(curves, UPDATES, factor_title(factor), "macro_f1")
        for factor in PLOTTED
        if (curves := factor_curves(plan, seeds, runs, factor))
    ]
    write_atomically(folder / "report.html", page(title, text, figures))
    return HarStudy(folder, table, equal, text)


def _laid_out(tree: Mapping[str, Any], seed: int, data: Mapping[str, Any]) -> Experiment:
    plain: Tree = {key: value for key, value in tree.items() if key not in ("study", "compare")}
    changed = {**plain.get("data", {}), **data}
    return Experiment(parse({**plain, "seed": seed, "data": changed}))


def _missing(plan: Plan, seeds: Sequence[int], runs: Path) -> dict[str, list[str]]:
    """Classes that some seed's central test set lacks, by kind of test set."""
    found: dict[str, list[str]] = {}
    marker = "classes absent from the central test set: "
    for variant in plan.variants:
        test = variant.tree.get("data", {}).get("test", "fair")
        for seed in seeds:
            notes = read_json(runs / variant.cell(seed).folder / "summary.json")["notes"]
            for note in notes:
                if note.startswith(marker):
                    names = note.removeprefix(marker).split(", ")
                    found[test] = sorted({*found.get(test, []), *names})
    return found


def _skews(skew: Mapping[str, float], local: Mapping[str, float], totals: "pd.Series[int]") -> str:
    rows = [
        {"class": name, "examples": totals[name], "global": skew[name], "local": local[name]}
        for name in skew
    ]
    return pd.DataFrame(rows).to_csv(index=False)

"""The document of a comparison, from the files in its folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

import pandas as pd

from latecomer import __version__
from latecomer.errors import BadInput
from latecomer.study.compare import (
    cell_text,
    comparison_metric,
    legend,
    shown_columns,
    spread,
)
from latecomer.study.results import Comparison, Result, read_json
from latecomer.study.view.clusters import clusters
from latecomer.study.view.comparing import fleet_use, outcomes, together
from latecomer.study.view.compensation import compensation
from latecomer.study.view.devices import scores_of_all
from latecomer.study.view.history import read_history
from latecomer.study.view.learning import classes_of_all, learning_of_all
from latecomer.study.view.panels import Document, Rows, clock_for, without_empty
from latecomer.study.view.privacy import privacy
from latecomer.study.view.run_document import (
    budget_of,
    config_of,
    devices_of,
    fleet_of,
    late_classes,
)
from latecomer.study.view.staleness import staleness_of_all
from latecomer.study.view.timeline import timeline
from latecomer.study.view.traffic import traffic_of_all

SPANS_PER_STRATEGY = 8_000  # in the timeline


def comparison_document(comparison: Comparison) -> Document:
    """All panels and tables of a comparison; event logs are read for the first seed only."""
    by_strategy: dict[str, list[Result]] = {}
    for (strategy, _), run in comparison.runs.items():
        by_strategy.setdefault(strategy, []).append(run)
    table = comparison.table
    if not by_strategy or "strategy" not in table:
        raise BadInput(f"{comparison.folder / 'compare.csv'}: it has no strategies")
    metrics = {label: [r.metrics for r in some] for label, some in by_strategy.items()}
    ends = [m["virtual_seconds"].iloc[-1] for some in metrics.values() for m in some]
    clock = clock_for(float(max(ends)))
    first = {label: some[0] for label, some in by_strategy.items()}
    histories = {label: read_history(r.folder / "events.jsonl") for label, r in first.items()}
    fleets = {label: fleet_of(r.folder) for label, r in first.items()}
    budgets = {label: budget_of(config_of(r)) for label, r in first.items()}
    late = late_classes(next(iter(first.values())).folder)
    main = comparison_metric(table)
    target = read_json(comparison.folder / "compare.json").get(f"target_{main.name}")
    devices = {
        label: [t for r in some if (t := devices_of(r.folder)) is not None]
        for label, some in by_strategy.items()
    }
    panels = without_empty(
        (
            learning_of_all(metrics, clock),
            outcomes(table, target, main),
            classes_of_all(metrics, late),
            scores_of_all(devices),
            fleet_use(histories, fleets),
            together(
                {
                    label: timeline(h, fleets[label], clock, SPANS_PER_STRATEGY)
                    for label, h in histories.items()
                }
            ),
            staleness_of_all(histories),
            together({label: compensation(h, clock) for label, h in histories.items()}),
            together({label: clusters(h, clock) for label, h in histories.items()}),
            together({label: privacy(h, budgets[label], clock) for label, h in histories.items()}),
            traffic_of_all(_column(table, "bytes_up"), _column(table, "bytes_down")),
        )
    )
    seeds = table["seed"].nunique() if "seed" in table else 1
    return Document(
        title="Latecomer comparison",
        subtitle=f"{len(by_strategy)} strategies, {seeds} seeds each",
        facts={},
        panels=panels,
        tables=[_table(table, target)],
        texts=_texts(comparison.folder),
    )


def _table(table: pd.DataFrame, target: float | None) -> Rows:
    stats = spread(table)
    columns: dict[str, list[Any]] = {"strategy": [str(label) for label in stats.index]}
    headings = shown_columns(table)
    shown = [column for column in headings if f"{column}_mean" in stats]
    for column in shown:
        columns[headings[column]] = [
            cell_text(row[f"{column}_mean"], row[f"{column}_std"]) for _, row in stats.iterrows()
        ]
    note = legend(shown, target, comparison_metric(table))
    about = f'Mean ± standard deviation over seeds; "-": not reached with every seed; {note}.'
    return Rows("summary", "Final results", about, columns)


def _column(table: pd.DataFrame, name: str) -> dict[str, list[float]]:
    return {
        str(label): [float(v) for v in some[name]]
        for label, some in table.groupby("strategy", sort=False)
    }


def _texts(folder: Path) -> Mapping[str, str]:
    """The config and the command that reproduces the comparison, from the files that exist."""
    texts: dict[str, str] = {}
    if (folder / "plan.json").is_file():
        plan = read_json(folder / "plan.json")
        command = [
            "latecomer compare compare.toml",
            f"--strategies {quote(','.join(map(str, plan.get('strategies', []))))}",
            f"--seeds {','.join(map(str, plan.get('seeds', [])))}",
        ]
        if plan.get("target") is not None:
            command.append(f"--target {json.dumps(plan['target'])}")
        command.append("--out again")
        texts["Command to reproduce"] = (
            f"# latecomer {__version__}; compare.toml is beside this page and below\n"
            "# a relative data.path in it is relative to the working directory\n"
            + " \\\n  ".join(command)
        )
    if (folder / "compare.toml").is_file():
        texts["Config"] = (folder / "compare.toml").read_text(encoding="utf-8")
    return texts

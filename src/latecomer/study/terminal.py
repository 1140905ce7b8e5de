"""Terminal output: progress of a run (a bar, or plain lines in a pipe) and result tables."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from latecomer.study.compare import (
    cell_text,
    comparison_metric,
    legend,
    shown_columns,
    spread,
)
from latecomer.study.experiment import Experiment
from latecomer.study.metric_names import (
    SHARES,
    MainMetric,
    label_of,
    main_metric,
    number_text,
)
from latecomer.study.runner import Silent

LINE_EVERY_SECONDS = 2.0
NARROW = ("accuracy_affected", "seconds_to_target", "staleness_mean")  # beside the main metric


def span(seconds: float) -> str:
    """A duration in seconds, minutes, hours or days, as text."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def headline(experiment: Experiment, verbose: bool) -> list[str]:
    """Strategy, data, fleet and model of a run, and the notes from setting it up."""
    config, fleet = experiment.config, experiment.fleet
    has_late = fleet.late and not experiment.recipe.punctual
    late = f", {len(fleet.late)} late" if has_late else ""
    how = config.data.partition if experiment.app is None else "Flower app"
    return [
        f"{experiment.recipe.name} on {experiment.source_name} ({how}),"
        f" {len(experiment.clients)} devices ({config.fleet.profile}{late}),"
        f" {experiment.model_name} with {experiment.model.layout.size:,} parameters",
        *([f"kernel: {experiment.kernel_choice}"] if verbose else []),
        *(f"note: {note}" for note in experiment.notes),
    ]


class Lines(Silent):
    """Progress as plain lines, at most one every LINE_EVERY_SECONDS; for logs and pipes."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose
        self._printed = 0.0  # wall time of the last line
        self._metric = MainMetric().name

    def started(self, experiment: Experiment, folder: Path) -> None:
        self._metric = experiment.scoring.main
        for line in headline(experiment, self.verbose):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        if time.monotonic() - self._printed < LINE_EVERY_SECONDS:
            return
        self._printed = time.monotonic()
        self.console.print(
            f"{row['updates']} updates, {span(row['virtual_seconds'])} virtual,"
            f" {_score(self._metric, row)}",
            highlight=False,
        )

    def warned(self, text: str) -> None:
        self.warnings += (text,)
        self.console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)


class Bar(Silent):
    """Progress as one bar with text; for terminals."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose
        self._bar = Progress(
            BarColumn(bar_width=30 if console.width >= 120 else 12),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0, state="")
        self._metric, self._score = MainMetric().name, ""  # of the last evaluation
        self._drawn = 0.0

    def started(self, experiment: Experiment, folder: Path) -> None:
        self._metric = experiment.scoring.main
        Lines(self.console, self.verbose).started(experiment, folder)
        self._bar.start()

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if time.monotonic() - self._drawn < 0.1:
            return
        self._drawn = time.monotonic()
        state = f"{updates:,} updates, {span(virtual_seconds)} virtual{self._score}"
        self._bar.update(self._task, completed=min(1.0, share), state=state)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._score = f", {_score(self._metric, row)}"

    def warned(self, text: str) -> None:
        self.warnings += (text,)
        Lines(self.console).warned(text)

    def finished(self) -> None:
        self._bar.stop()


def progress_for(console: Console, verbose: bool) -> Lines | Bar:
    return Bar(console, verbose) if console.is_terminal else Lines(console, verbose)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The main numbers of summary.json, one per row."""
    table = Table(show_header=False, box=None, pad_edge=False)
    main = main_metric(summary).name
    local = summary[f"client_{main}"]
    # A classification has no list of metrics, and its loss is not shown.
    names = summary.get("metrics") or list(SHARES)[:4]
    rows: list[tuple[str, str]] = [
        *((label_of(name), number_text(name, summary[name])) for name in names),
        (f"local test {label_of(main)}, mean", number_text(main, local["mean"])),
        ("  worst device", number_text(main, local["worst"])),
        ("  late devices", number_text(main, local["late_mean"])),
        ("client updates", f"{summary['updates']:,}"),
        ("  refused, dropped", _lost(summary)),
        ("model versions", f"{summary['versions']:,}"),
        (
            "staleness, mean and largest",
            f"{summary['staleness']['mean']:.1f}, {summary['staleness']['max']}",
        ),
        ("compensated updates", compensation_text(summary)),
        ("virtual time", span(summary["virtual_seconds"])),
        (
            "bytes up, down",
            f"{summary['bytes']['up'] / 1e6:.1f} MB, {summary['bytes']['down'] / 1e6:.1f} MB",
        ),
        ("wall time", f"{summary['wall_seconds']:.1f} s"),
    ]
    for name, value in rows:
        if value != "-":
            table.add_row(name, value)
    return table


def compensation_text(summary: Mapping[str, Any]) -> str:
    """Number of compensated updates, server time, switch-off; "-": no staleness compensation."""
    found = summary["compensation"]
    if found is None:
        return "-"
    switched_at = found["switched_at"]
    off = "" if switched_at is None else f", first switched off at version {switched_at:,}"
    return f"{found['count']:,} ({span(found['seconds'])} of server time{off})"


def _lost(summary: Mapping[str, Any]) -> str:
    refused, dropped = summary["refused"], summary["dropped"]
    return f"{refused:,}, {dropped:,}" if refused or dropped else "-"


def comparison_table(table: pd.DataFrame, narrow: bool) -> Table:
    """Mean ± standard deviation over seeds, a row per strategy; `narrow`: main columns only."""
    stats, headings = spread(table), shown_columns(table)
    main = next(iter(headings))
    columns = [c for c in headings if f"{c}_mean" in stats]
    columns = [c for c in columns if c in (main, *NARROW)] if narrow else columns
    caption = legend(columns, table.attrs.get("target"), comparison_metric(table))
    shown = Table(box=None, pad_edge=False, caption=caption or None, caption_justify="left")
    for name in ("strategy", *(headings[c] for c in columns)):
        shown.add_column(name, no_wrap=True, justify="left" if name == "strategy" else "right")
    for strategy, row in stats.iterrows():
        cells = (cell_text(row[f"{c}_mean"], row[f"{c}_std"]) for c in columns)
        shown.add_row(str(strategy), *cells)
    return shown


def _score(name: str, row: Mapping[str, Any]) -> str:
    return f"{label_of(name)} {number_text(name, row[name])}"

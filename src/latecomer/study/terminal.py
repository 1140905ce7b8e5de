"""What people see in a terminal: progress (plain lines elsewhere) and tables."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from latecomer.study.compare import SHOWN, cell_text, spread
from latecomer.study.experiment import Experiment

LINE_EVERY_SECONDS = 2.0
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 16
NARROW = ("accuracy", "accuracy_affected", "seconds_to_target", "staleness_mean")


def span(seconds: float) -> str:
    """Virtual time in a unit people read."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The last values as little bars between their lowest and highest; older ones are merged."""
    if not values:
        return ""
    step = -(-len(values) // width)
    # From the end, so that the last bar is always the last value.
    picked = list(values[::-1][::step][::-1])
    low, high = min(picked), max(picked)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in picked)


class Pace:
    """Updates per second of wall time since it began to count."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None

    def __call__(self, updates: int) -> str:
        now = time.monotonic()
        if self._begun is None:
            self._begun = (now, updates)
        seconds, done = now - self._begun[0], updates - self._begun[1]
        return f"{done / seconds:,.0f} updates/s" if seconds > 0.2 and done else ""


def headline(experiment: Experiment, verbose: bool) -> list[str]:
    """What is about to run, and what was odd in setting it up."""
    config, fleet = experiment.config, experiment.fleet
    are_late = fleet.late and not experiment.recipe.punctual
    late = f", {len(fleet.late)} late" if are_late else ""
    working = len(experiment.clients)
    return [
        f"{config.strategy.name} on {config.data.source} ({config.data.partition}),"
        f" {working} devices ({config.fleet.profile}{late}),"
        f" {config.model.name} with {experiment.model.layout.size:,} parameters",
        *([f"kernel: {experiment.kernel_choice}"] if verbose else []),
        *(f"note: {note}" for note in experiment.notes),
    ]


class Lines:
    """For logs and pipes: a line now and then."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console, self.verbose = console, verbose
        self._said = 0.0
        self._pace = Pace()

    def started(self, experiment: Experiment, folder: Path) -> None:
        for line in headline(experiment, self.verbose):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None: ...

    def evaluated(self, row: Mapping[str, Any]) -> None:
        pace = self._pace(row["updates"])
        if time.monotonic() - self._said < LINE_EVERY_SECONDS:
            return
        self._said = time.monotonic()
        self.console.print(
            f"{row['updates']} updates, {span(row['virtual_seconds'])} virtual,"
            f" accuracy {row['accuracy']:.3f}{', ' if pace else ''}{pace}",
            highlight=False,
        )

    def finished(self) -> None: ...


class Bar:
    """For a terminal: one line that moves."""

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
        self._accuracy: list[float] = []
        self._drawn = 0.0
        self._pace = Pace()
        self._sparks = console.encoding.lower().startswith("utf")

    def started(self, experiment: Experiment, folder: Path) -> None:
        Lines(self.console, self.verbose).started(experiment, folder)
        self._bar.start()

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if time.monotonic() - self._drawn < 0.1:
            return
        self._drawn = time.monotonic()
        state = self.state(updates, virtual_seconds)
        self._bar.update(self._task, completed=min(1.0, share), state=state)

    def state(self, updates: int, virtual_seconds: float) -> str:
        """What stands beside the bar; the least important goes first where it is narrow."""
        accuracy = f"accuracy {self._accuracy[-1]:.3f}" if self._accuracy else ""
        if self._sparks and len(self._accuracy) > 1:
            accuracy += f" {sparkline(self._accuracy)}"
        parts = [f"{updates:,} updates", f"{span(virtual_seconds)} virtual", accuracy]
        if self.console.width >= 120:
            parts.insert(1, self._pace(updates))
        return ", ".join(part for part in parts if part)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        self._accuracy.append(row["accuracy"])

    def finished(self) -> None:
        self._bar.stop()


def progress_for(console: Console, verbose: bool) -> Lines | Bar:
    return Bar(console, verbose) if console.is_terminal else Lines(console, verbose)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The end of a run at a glance."""
    table = Table(show_header=False, box=None, pad_edge=False)
    own = summary["client_accuracy"]
    rows: list[tuple[str, str]] = [
        ("accuracy", _share(summary["accuracy"])),
        ("balanced accuracy", _share(summary["balanced_accuracy"])),
        ("macro-F1", _share(summary["macro_f1"])),
        ("accuracy on affected classes", _share(summary["accuracy_affected"])),
        ("accuracy on the devices' own data", _share(own["mean"])),
        ("  worst device", _share(own["worst"])),
        ("  late devices", _share(own["late_mean"])),
        ("client updates", f"{summary['updates']:,}"),
        ("  refused, dropped", _lost(summary)),
        ("model versions", f"{summary['versions']:,}"),
        (
            "staleness, mean and largest",
            f"{summary['staleness']['mean']:.1f}, {summary['staleness']['max']}",
        ),
        ("repaired late updates", repairs(summary)),
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


def repairs(summary: Mapping[str, Any]) -> str:
    """How many late updates were compensated, and whether that ended; "-" if never meant to."""
    found = summary["compensation"]
    if found is None:
        return "-"
    ended = (
        ""
        if found["switched_at"] is None
        else f", first switched off at version {found['switched_at']:,}"
    )
    return f"{found['count']:,} in {span(found['seconds'])} of the server{ended}"


def _lost(summary: Mapping[str, Any]) -> str:
    refused, dropped = summary["refused"], summary["dropped"]
    return f"{refused:,}, {dropped:,}" if refused or dropped else "-"


def comparison_table(table: pd.DataFrame, narrow: bool) -> Table:
    """Mean and spread over seeds, a row per strategy; a narrow one has the main columns only."""
    stats = spread(table)
    columns = [c for c in (NARROW if narrow else SHOWN) if f"{c}_mean" in stats]
    target = table.attrs.get("target")
    caption = None if target is None else f"target: accuracy {target:g}"
    shown = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("strategy", *(SHOWN[c] for c in columns)):
        shown.add_column(name, no_wrap=True, justify="left" if name == "strategy" else "right")
    for strategy, row in stats.iterrows():
        cells = (cell_text(row[f"{c}_mean"], row[f"{c}_std"]) for c in columns)
        shown.add_row(str(strategy), *cells)
    return shown


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

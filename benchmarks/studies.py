"""Runs and tables of one scenario with several methods and seeds, for all docs/studies."""

import argparse
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from charts import Line

EXAMPLES = Path(__file__).parent.parent / "examples"

Settings = Mapping[str, Any]  # dotted keys
Runs = Mapping[tuple[str, int], Any]  # results by method and seed


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, **options}}


@dataclass(frozen=True)
class Study:
    """A scenario with the settings of each of `points`, run with each of `methods`.

    `config` is a file in examples.
    """

    config: str
    methods: Mapping[str, dict[str, Any]]
    points: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})

    def tree(self, point: str = "") -> dict[str, Any]:
        """The config, with the point's settings and a section for each method."""
        tree: dict[str, Any] = tomllib.loads((EXAMPLES / self.config).read_text())
        if "path" in tree["data"]:
            tree["data"]["path"] = str(EXAMPLES.parent / tree["data"]["path"])
        for key, value in self.points[point].items():
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        tree["compare"] = {label: dict(changes) for label, changes in self.methods.items()}
        return tree

    def run(self, name: str, point: str, args: argparse.Namespace) -> Runs:
        """The finished runs of one point; an interrupted comparison is resumed."""
        import latecomer
        from latecomer.study.compare import resume_comparison

        folder = Path(args.out) / "-".join([name, *point.split()]).replace("/", "-")
        if folder.exists() and not (folder / "compare.csv").exists():
            resume_comparison(folder, jobs=args.jobs)
        elif not folder.exists():
            methods = list(self.methods)
            latecomer.compare(
                self.tree(point), methods, seeds=args.seeds, out=folder, jobs=args.jobs
            )
        return dict(latecomer.load(folder).runs)


def arguments(about: str, names: Iterable[str], out: str) -> argparse.ArgumentParser:
    """The options that every study takes."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(names), metavar="NAME")
    parser.add_argument("--seeds", default="1,2,3", type=lambda t: [int(s) for s in t.split(",")])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", default=out)
    parser.add_argument("--charts", default="")
    return parser


def by_method(runs: Runs) -> dict[str, list[Any]]:
    """The results of each method, over the seeds."""
    found: dict[str, list[Any]] = {}
    for (label, _), result in runs.items():
        found.setdefault(label, []).append(result)
    return found


def spread(values: Iterable[float], digits: int) -> str:
    """Mean and standard deviation over seeds, and the number of seeds if some have no value."""
    all_values = np.array(list(values), dtype=float)
    known = all_values[~np.isnan(all_values)]
    if not len(known):
        return "-"
    deviation = f" ± {known.std(ddof=1):,.{digits}f}" if len(known) > 1 else ""
    some = f" ({len(known)} of {len(all_values)})" if len(known) < len(all_values) else ""
    return f"{known.mean():,.{digits}f}{deviation}{some}"


def table(rows: Mapping[str, list[dict[str, float]]], digits: Mapping[str, int]) -> str:
    """A Markdown table with one row per method and one column per measure.

    `digits` gives the decimals of columns by the beginning of their names; others have one.
    """
    columns = list(next(iter(rows.values()))[0])
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, runs in rows.items():
        cells = []
        for column in columns:
            decimals = next((d for name, d in digits.items() if column.startswith(name)), 1)
            cells.append(spread((run[column] for run in runs), decimals))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(runs: Runs, column: str, along: str, unit: float = 1.0) -> dict[str, Line]:
    """Mean, lowest and highest of a metric over seeds, on a common grid of `along` / `unit`."""
    lines: dict[str, Line] = {}
    for label, results in by_method(runs).items():
        several: list[pd.DataFrame] = [result.metrics for result in results]
        grid = np.linspace(0, min(m[along].iloc[-1] for m in several) / unit, 81)
        values = np.stack([np.interp(grid, m[along] / unit, m[column]) for m in several])
        parts = (grid, values.mean(0), values.min(0), values.max(0))
        lines[label] = list(zip(*(part.tolist() for part in parts), strict=True))
    return lines

"""Reading runs back: a folder as a pandas-friendly object."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.errors import BadInput

STALENESS = re.compile(r'"staleness":(\d+)[,}]')


@dataclass(frozen=True)
class Result:
    """The files of one run."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self.folder / "summary.json")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation; none for a deployed run whose server does not evaluate."""
        path = self.folder / "metrics.csv"
        if self.deployed and not path.is_file():
            return pd.DataFrame(columns=["updates", "virtual_seconds", "accuracy"], dtype=float)
        try:
            table = pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error
        if self.deployed and "virtual_seconds" not in table and "wall_seconds" in table:
            table["virtual_seconds"] = table["wall_seconds"]  # there is no other time
        if missing := {"updates", "virtual_seconds", "accuracy"} - set(table):
            raise BadInput(f"{path}: not the metrics of a run, it has no {', '.join(missing)}")
        return table

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row per event. A line that a running run has not written to its end is left out."""
        path = self.folder / "events.jsonl"
        try:
            text = path.read_text(encoding="utf-8")
            return pd.read_json(StringIO(text[: text.rfind("\n") + 1]), lines=True)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error

    @cached_property
    def staleness(self) -> dict[int, int]:
        """How many arriving updates had which staleness; reads the log line by line."""
        path, counts = self.folder / "events.jsonl", Counter[int]()
        try:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    if not line.startswith("{"):
                        raise ValueError("a line is no event")
                    if '"event":"arrival"' in line and (found := STALENESS.search(line)):
                        counts[int(found[1])] += 1
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error
        return dict(sorted(counts.items()))

    @property
    def deployed(self) -> bool:
        """Whether real devices have made it: such a run has a log and no config."""
        return is_deployed(self.folder)

    @cached_property
    def config(self) -> str:
        path = self.folder / "config.toml"
        if self.deployed:
            return ""
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Comparison:
    """The files of a comparison."""

    folder: Path

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per strategy and seed."""
        path = self.folder / "compare.csv"
        try:
            return pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error

    @cached_property
    def runs(self) -> dict[tuple[str, int], Result]:
        path = self.folder / "compare.json"
        try:
            return {
                (cell["strategy"], cell["seed"]): Result(self.folder / cell["folder"])
                for cell in read_json(path)["runs"]
            }
        except (KeyError, TypeError) as error:
            raise BadInput(f"{path}: not the list of a comparison's runs ({error})") from error


def load(folder: str | Path) -> Result | Comparison:
    """What lies in a folder that `run` or `compare` has written."""
    path = Path(folder)
    if (path / "compare.json").is_file():
        return Comparison(path)
    if (path / "metrics.csv").is_file() or is_deployed(path):
        return Result(path)
    raise BadInput(f"{path}: neither a run (metrics.csv) nor a comparison (compare.json) is here")


def is_deployed(folder: Path) -> bool:
    """Whether a deployed server has worked in this folder: it leaves a log, and no config."""
    simulated = any((folder / name).is_file() for name in ("config.toml", "fleet.json"))
    return (folder / "events.jsonl").is_file() and not simulated


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def without_nan(value: Any) -> Any:
    """The same with None for every number that JSON cannot say."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def flatten(summary: dict[str, Any]) -> dict[str, Any]:
    """The scalars of a summary, nested ones joined by `_`."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{inner}": v for inner, v in value.items()})
        elif not isinstance(value, list):
            flat[key] = value
    return flat

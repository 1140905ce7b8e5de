"""Reading runs back: a folder as a pandas-friendly object."""

import json
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.errors import BadInput


@dataclass(frozen=True)
class Result:
    """The files of one run."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self.folder / "summary.json")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation."""
        path = self.folder / "metrics.csv"
        try:
            table = pd.read_csv(path)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read: {error}") from error
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
    def config(self) -> str:
        path = self.folder / "config.toml"
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
    if (path / "metrics.csv").is_file():
        return Result(path)
    raise BadInput(f"{path}: neither a run (metrics.csv) nor a comparison (compare.json) is here")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def flatten(summary: dict[str, Any]) -> dict[str, Any]:
    """The scalars of a summary, nested ones joined by `_`."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{inner}": v for inner, v in value.items()})
        elif not isinstance(value, list):
            flat[key] = value
    return flat

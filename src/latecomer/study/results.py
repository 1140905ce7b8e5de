"""Reading runs back: a folder as a pandas-friendly object."""

import json
from dataclasses import dataclass
from functools import cached_property
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
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per evaluation."""
        return pd.read_csv(self.folder / "metrics.csv")

    @cached_property
    def events(self) -> pd.DataFrame:
        """One row per event."""
        return pd.read_json(self.folder / "events.jsonl", lines=True)

    @cached_property
    def config(self) -> str:
        return (self.folder / "config.toml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Comparison:
    """The files of a comparison."""

    folder: Path

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per strategy and seed."""
        return pd.read_csv(self.folder / "compare.csv")

    @cached_property
    def runs(self) -> dict[tuple[str, int], Result]:
        cells = json.loads((self.folder / "compare.json").read_text(encoding="utf-8"))["runs"]
        return {
            (cell["strategy"], cell["seed"]): Result(self.folder / cell["folder"]) for cell in cells
        }


def load(folder: str | Path) -> Result | Comparison:
    """What lies in a folder that `run` or `compare` has written."""
    path = Path(folder)
    if (path / "compare.json").is_file():
        return Comparison(path)
    if (path / "metrics.csv").is_file():
        return Result(path)
    raise BadInput(f"{path}: neither a run (metrics.csv) nor a comparison (compare.json) is here")


def flatten(summary: dict[str, Any]) -> dict[str, Any]:
    """The scalars of a summary, nested ones joined by `_`."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{inner}": v for inner, v in value.items()})
        elif not isinstance(value, list):
            flat[key] = value
    return flat

"""Reads the folder of a run or a comparison: tables as pandas data frames, JSON as dicts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.errors import BadInput
from latecomer.study.metric_names import metric_columns


@dataclass(frozen=True)
class Result:
    """The files of one run, read when first used."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read_json(self.folder / "summary.json")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """metrics.csv: one row per evaluation; empty if a deployed server does not evaluate."""
        path = self.folder / "metrics.csv"
        if self.deployed and not path.is_file():
            return pd.DataFrame(columns=["updates", "virtual_seconds", "accuracy"], dtype=float)
        table = read_csv(path)
        if self.deployed and "virtual_seconds" not in table and "wall_seconds" in table:
            table["virtual_seconds"] = table["wall_seconds"]  # deployed runs have wall time only
        missing = {"updates", "virtual_seconds"} - set(table)
        if missing := missing or (set() if metric_columns(table) else {"accuracy"}):
            raise BadInput(f"{path}: columns are missing: {', '.join(missing)}")
        return table

    @cached_property
    def events(self) -> pd.DataFrame:
        """events.jsonl: one row per event; an incomplete last line is left out."""
        with readable(path := self.folder / "events.jsonl"):
            text = path.read_text(encoding="utf-8")
            return pd.read_json(StringIO(text[: text.rfind("\n") + 1]), lines=True)

    @property
    def deployed(self) -> bool:
        """Whether a deployed server wrote the folder, not a simulation."""
        return is_deployed(self.folder)

    @cached_property
    def config(self) -> str:
        """The text of config.toml; empty for a deployed run."""
        if self.deployed:
            return ""
        with readable(path := self.folder / "config.toml"):
            return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Comparison:
    """The files of a comparison, read when first used."""

    folder: Path

    @cached_property
    def table(self) -> pd.DataFrame:
        """compare.csv: one row per strategy and seed."""
        return read_csv(self.folder / "compare.csv")

    @cached_property
    def runs(self) -> dict[tuple[str, int], Result]:
        """(strategy, seed) -> its run."""
        path = self.folder / "compare.json"
        try:
            return {
                (cell["strategy"], cell["seed"]): Result(self.folder / cell["folder"])
                for cell in read_json(path)["runs"]
            }
        except (KeyError, TypeError) as error:
            raise BadInput(f"{path}: not the list of a comparison's runs ({error})") from error


def load(folder: str | Path) -> Result | Comparison:
    """The run or comparison in a folder that `run` or `compare` has written."""
    path = Path(folder)
    if (path / "compare.json").is_file():
        return Comparison(path)
    if (path / "metrics.csv").is_file() or is_deployed(path):
        return Result(path)
    raise BadInput(f"{path}: neither a run (metrics.csv) nor a comparison (compare.json) is here")


def is_deployed(folder: Path) -> bool:
    """Whether a deployed server wrote this folder: it has a log, but no config."""
    simulated = any((folder / name).is_file() for name in ("config.toml", "fleet.json"))
    return (folder / "events.jsonl").is_file() and not simulated


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of reading `path` into BadInput."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def read_csv(path: Path) -> pd.DataFrame:
    """The table in a CSV file; BadInput if it cannot be read."""
    with readable(path):
        return pd.read_csv(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; BadInput if it cannot be read."""
    with readable(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def without_nan(value: Any) -> Any:
    """The same value with None for nan and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def flatten(summary: dict[str, Any]) -> dict[str, Any]:
    """The scalars of a summary; nested keys are joined by `_`."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if isinstance(value, dict):
            flat.update({f"{key}_{inner}": v for inner, v in value.items()})
        elif not isinstance(value, list):
            flat[key] = value
    return flat

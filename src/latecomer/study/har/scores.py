"""From the files of finished runs to one tidy table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer.study.har.plan import (
    ASYNCHRONOUS,
    BASE,
    CENTRALISED,
    FEDERATED,
    Plan,
    Variant,
)
from latecomer.study.results import flatten, read_json

LAST = 5  # evaluations over which a score is averaged, as in the paper
SCORED = ("macro_f1", "balanced_accuracy", "accuracy", "loss")
FROM_SUMMARY = (
    "virtual_seconds",
    "wall_seconds",
    "staleness_mean",
    "client_accuracy_mean",
    "client_accuracy_worst",
    "client_balanced_accuracy_mean",
    "client_balanced_accuracy_worst",
    "client_macro_f1_mean",
    "client_macro_f1_worst",
    "best_updates",
    "best_macro_f1",
    "best_validation_macro_f1",
    "ended_by",
)


def curve(folder: Path, variant: Variant) -> pd.DataFrame:
    """The evaluations of a run; `updates` counts client updates in every way of learning."""
    rows = pd.read_csv(folder / "metrics.csv")
    if variant.paradigm == CENTRALISED:
        rows["updates"] *= variant.devices
    return rows


def score(rows: pd.DataFrame, most: float | None = None) -> pd.Series:
    """The mean of the last evaluations, of those with at most so many updates."""
    seen = rows if most is None else rows[rows["updates"] <= most]
    # The untrained model is no score, unless it is all there is.
    trained = seen[seen["updates"] > 0]
    return (trained if len(trained) else seen).tail(LAST).mean(numeric_only=True)


def tidy(plan: Plan, seeds: Sequence[int], folder: Path, rarest: str) -> pd.DataFrame:
    """One row per run: what was changed to what, and how it went."""
    return pd.DataFrame(
        [
            _row(folder / variant.cell(seed).folder, variant, seed, rarest)
            for seed in seeds
            for variant in plan.variants
        ]
    )


def _row(folder: Path, variant: Variant, seed: int, rarest: str) -> dict[str, Any]:
    rows = curve(folder, variant)
    found = score(rows)
    summary: Mapping[str, Any] = flatten(read_json(folder / "summary.json"))
    return {
        "paradigm": variant.paradigm,
        "factor": variant.factor,
        "value": variant.value,
        "seed": seed,
        "updates": int(rows["updates"].iloc[-1]),
        **{name: found[name] for name in SCORED},
        "f1_rarest": found[f"f1_{rarest}"],
        **{name: found[name] for name in rows.columns if name.startswith("f1_")},
        **{name: summary.get(name) for name in FROM_SUMMARY},
        "folder": folder.name,
    }


def at_equal_updates(plan: Plan, seeds: Sequence[int], folder: Path) -> pd.DataFrame:
    """Base runs read at the most updates that both federated ones reached; a row per run.

    A centralised run that early stopping has ended before is read at its end.
    """
    found = []
    for seed in seeds:
        curves = {
            variant.paradigm: curve(folder / variant.cell(seed).folder, variant)
            for variant in plan.variants
            if variant.factor == BASE
        }
        most = min(curves[paradigm]["updates"].iloc[-1] for paradigm in FEDERATED)
        for paradigm, rows in curves.items():
            there = rows[rows["updates"] <= most]
            found.append(
                {
                    "paradigm": paradigm,
                    "seed": seed,
                    "updates": int(there["updates"].iloc[-1]),
                    "virtual_seconds": there["virtual_seconds"].iloc[-1],
                    **{name: score(rows, most)[name] for name in SCORED},
                }
            )
    return pd.DataFrame(found)


def base_curves(plan: Plan, seeds: Sequence[int], folder: Path) -> dict[str, list[pd.DataFrame]]:
    """The base runs of each way of learning, seed by seed."""
    return {
        variant.paradigm: [curve(folder / variant.cell(seed).folder, variant) for seed in seeds]
        for variant in plan.variants
        if variant.factor == BASE
    }


def factor_curves(
    plan: Plan, seeds: Sequence[int], folder: Path, factor: str
) -> dict[str, list[pd.DataFrame]]:
    """The asynchronous runs for each value of a factor, seed by seed."""
    found = {}
    for value in plan.values(factor):
        variant = plan.find(ASYNCHRONOUS, factor, value)
        if variant is not None:
            runs = [folder / variant.cell(seed).folder for seed in seeds]
            found[value] = [curve(run, variant) for run in runs]
    return found

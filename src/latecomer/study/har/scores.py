"""Scores of finished runs: learning curves, and one table with a row per run."""

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

LAST_EVALUATIONS = 5  # a score is the mean over these, as in the paper
SCORE_COLUMNS = ("macro_f1", "balanced_accuracy", "accuracy", "loss")
SUMMARY_COLUMNS = (
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


def learning_curve(folder: Path, variant: Variant) -> pd.DataFrame:
    """The evaluations of a run; a centralised update counts as one client update per device."""
    rows = pd.read_csv(folder / "metrics.csv")
    if variant.paradigm == CENTRALISED:
        rows["updates"] *= variant.devices
    return rows


def score(curve: pd.DataFrame, max_updates: float | None = None) -> pd.Series:
    """The mean of the last evaluations, of those at no more than `max_updates` updates."""
    rows = curve if max_updates is None else curve[curve["updates"] <= max_updates]
    # The untrained model counts only if it is the only evaluation.
    trained = rows[rows["updates"] > 0]
    return (trained if len(trained) else rows).tail(LAST_EVALUATIONS).mean(numeric_only=True)


def results_table(plan: Plan, seeds: Sequence[int], folder: Path, rarest: str) -> pd.DataFrame:
    """results.csv: one row per run with paradigm, factor, value, seed and scores."""
    return pd.DataFrame(
        [
            _row(folder / variant.cell(seed).folder, variant, seed, rarest)
            for seed in seeds
            for variant in plan.variants
        ]
    )


def _row(folder: Path, variant: Variant, seed: int, rarest: str) -> dict[str, Any]:
    curve = learning_curve(folder, variant)
    scores = score(curve)
    summary: Mapping[str, Any] = flatten(read_json(folder / "summary.json"))
    return {
        "paradigm": variant.paradigm,
        "factor": variant.factor,
        "value": variant.value,
        "seed": seed,
        "updates": int(curve["updates"].iloc[-1]),
        **{name: scores[name] for name in SCORE_COLUMNS},
        "f1_rarest": scores[f"f1_{rarest}"],
        **{name: scores[name] for name in curve.columns if name.startswith("f1_")},
        **{name: summary.get(name) for name in SUMMARY_COLUMNS},
        "folder": folder.name,
    }


def at_equal_updates(plan: Plan, seeds: Sequence[int], folder: Path) -> pd.DataFrame:
    """equal.csv: the base runs at the largest number of updates that both FL paradigms reached.

    One row per run. A centralised run that stopped earlier is read at its end.
    """
    rows = []
    for seed in seeds:
        curves = {name: runs[0] for name, runs in base_curves(plan, [seed], folder).items()}
        max_updates = min(curves[paradigm]["updates"].iloc[-1] for paradigm in FEDERATED)
        for paradigm, curve in curves.items():
            reached = curve[curve["updates"] <= max_updates]
            rows.append(
                {
                    "paradigm": paradigm,
                    "seed": seed,
                    "updates": int(reached["updates"].iloc[-1]),
                    "virtual_seconds": reached["virtual_seconds"].iloc[-1],
                    **{name: score(curve, max_updates)[name] for name in SCORE_COLUMNS},
                }
            )
    return pd.DataFrame(rows)


def base_curves(plan: Plan, seeds: Sequence[int], folder: Path) -> dict[str, list[pd.DataFrame]]:
    """Paradigm -> the learning curves of its base runs, one per seed."""
    return {
        variant.paradigm: _curves(folder, variant, seeds)
        for variant in plan.variants
        if variant.factor == BASE
    }


def factor_curves(
    plan: Plan, seeds: Sequence[int], folder: Path, factor: str
) -> dict[str, list[pd.DataFrame]]:
    """Value of the factor -> the learning curves of the asynchronous runs, one per seed."""
    variants = {value: plan.find(ASYNCHRONOUS, factor, value) for value in plan.values(factor)}
    return {value: _curves(folder, v, seeds) for value, v in variants.items() if v is not None}


def _curves(folder: Path, variant: Variant, seeds: Sequence[int]) -> list[pd.DataFrame]:
    return [learning_curve(folder / variant.cell(seed).folder, variant) for seed in seeds]

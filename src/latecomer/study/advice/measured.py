"""From the files of a finished run or comparison to the facts about it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes
from latecomer.study.advice.facts import Contest, Run
from latecomer.study.advice.scenario import away_share
from latecomer.study.config import load_config
from latecomer.study.results import Comparison, Result, read_json
from latecomer.study.view.history import History, read_history

RARELY = 0.2  # the share of devices that were heard least
LAST_PART = 0.8  # of a run's time; what comes after it is its end


def last_part(rows: pd.DataFrame, column: str) -> float:
    """The mean over the last fifth of a run's virtual time; nan if nothing was measured."""
    end = rows["virtual_seconds"].iloc[-1]
    return float(rows.loc[rows["virtual_seconds"] >= LAST_PART * end, column].mean())


def measured(result: Result) -> Run:
    """What a run tells of itself."""
    if not (result.folder / "summary.json").is_file():
        raise BadInput(
            f"{result.folder}: the run is not finished; go on with"
            f" `latecomer run --resume {result.folder}`, or give its config.toml"
        )
    summary, history = result.summary, read_history(result.folder / "events.jsonl")
    config = load_config(result.folder / "config.toml")
    own = _own_accuracy(result.folder, history)
    late, fleet = set(summary["late_devices"]), read_json(result.folder / "fleet.json")
    answers = max(1, summary["updates"] + summary["refused"])
    lost = summary["dropped"] / max(1, answers + summary["dropped"])
    retired = (summary["epsilon"] or {}).get("retired", 0) / max(1, len(history.devices))
    return Run(
        strategy=summary["strategy"],
        lr=config.training.lr,
        chance=1 / max(1, len(summary["f1"])),
        **_curve(result.metrics),
        own_mean=summary["client_accuracy"]["mean"],
        own_worst=summary["client_accuracy"]["worst"],
        **own,
        refused=summary["refused"] / answers,
        dropped=lost,
        waiting=_waiting(history, fleet),
        staleness_mean=summary["staleness"]["mean"],
        staleness_most=_quantile(history.staleness, 0.9),
        staleness_max=summary["staleness"]["max"],
        late_updates=_share_of(history.updates, late),
        late_weight=_share_of(history.weights, late),
        retired=retired,
        clusters=(summary["clusters"] or {}).get("final"),
        megabytes_up=summary["bytes"]["up"] / 1e6,
        **_repairs(summary, history),
    )


def _curve(rows: pd.DataFrame) -> dict[str, Any]:
    time, accuracy = rows["virtual_seconds"], rows["accuracy"]
    end = float(time.iloc[-1])
    before = accuracy[(time >= 0.65 * end) & (time <= 0.75 * end)]
    return {
        "accuracy": last_part(rows, "accuracy"),
        "dip": float((accuracy.cummax() - accuracy)[time >= 0.5 * end].max()),
        "gain": float(accuracy[time >= 0.9 * end].mean() - before.mean()) if len(before) else 0.0,
    }


def _own_accuracy(folder: Path, history: History) -> dict[str, Any]:
    """Of late devices and the others, and of those heard least and the others."""
    try:
        table = pd.read_csv(folder / "devices.csv")
        table = table[(table["examples"] > 0) & table["accuracy"].notna()]
        is_late = table["late"] == 1
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder / 'devices.csv'}: cannot be read: {error}") from error
    heard = table["device"].map(lambda device: history.updates.get(device, 0))
    # Where all are heard equally often nobody is rare.
    rare = heard.rank(method="first") <= RARELY * len(table)
    rare &= heard < 0.5 * heard.median()
    return {
        "own_late": _mean(table.loc[is_late, "accuracy"]),
        "own_others": _mean(table.loc[~is_late, "accuracy"]),
        "own_rare": _mean(table.loc[rare, "accuracy"]),
        "own_frequent": _mean(table.loc[~rare, "accuracy"]),
    }


def _mean(values: "pd.Series[Any]") -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(counts: Mapping[int, int], share: float) -> int:
    """The least value that is not exceeded by this share of what was counted; 0 of nothing."""
    left = share * sum(counts.values())
    for value, count in sorted(counts.items()):
        left -= count
        if left <= 0:
            return value
    return 0


def _share_of(by_device: Mapping[int, float], chosen: Iterable[int]) -> float | None:
    """How much of a sum falls to these devices; None if there are none, or nothing."""
    total, devices = sum(by_device.values()), list(chosen)
    if not devices or not total:
        return None
    return sum(by_device.get(device, 0) for device in devices) / total


def _waiting(history: History, fleet: Mapping[str, Any]) -> float:
    """The share of time in which devices could have worked and had no task."""
    tasks, devices = history.tasks, max(1, len(history.devices))
    whole = np.array(tasks.ended) - np.array(tasks.sent)
    spans = np.sum([np.array(column) for column in tasks.spans], axis=0)
    # What is lost, or comes without its spans, kept the device for all that time.
    at_work = float(np.where(np.isnan(spans), whole, spans).sum())
    at_work += sum(history.now - sent for _, sent in history.open.values())
    away = sum(away_share(windows, period) for period, windows in fleet["windows"].values())
    away /= devices
    there = history.now * devices
    return min(1.0, max(0.0, 1 - at_work / there - away)) if there else 0.0


def _repairs(summary: Mapping[str, Any], history: History) -> dict[str, Any]:
    found = summary["compensation"]
    if found is None:
        return {}
    judged = [j for j in history.validations if j.get("error_stale") is not None]
    right = [
        j["error_estimate"] is not None and j["error_estimate"] < j["error_stale"] for j in judged
    ]
    ended = found["switched_at"]
    return {
        "repairs": found["count"],
        "repairing": found["seconds"] / max(summary["virtual_seconds"], 1e-9),
        "repairs_right": sum(right) / len(right) if right else None,
        "switched_after": None if ended is None else ended / max(1, summary["versions"]),
    }


def contest(comparison: Comparison) -> tuple[Contest, Result]:
    """Who won by mean accuracy, by how much over the second, and the first run of the winner.

    References (an oracle, everybody's data in one place) are no strategies for a fleet, and
    cannot win unless there is nothing else.
    """
    table = comparison.table
    if missing := {"strategy", "seed", "accuracy"} - set(table):
        raise BadInput(f"{comparison.folder}: compare.csv has no {', '.join(sorted(missing))}")
    by_seed = table.pivot(index="seed", columns="strategy", values="accuracy")
    order = by_seed.mean().sort_values(ascending=False, kind="stable").index.tolist()
    marks = {r.name for r in recipes().values() if r.pooled or r.punctual}
    winner, second, *_ = [*([n for n in order if n not in marks] or order), ""]
    gaps = by_seed[winner] - (by_seed[second] if second else by_seed[winner])
    spread = float(gaps.std()) if len(gaps) > 1 else None
    found = Contest(winner, second, float(gaps.mean()), spread, len(gaps))
    runs = comparison.runs
    return found, runs[winner, min(seed for name, seed in runs if name == winner)]

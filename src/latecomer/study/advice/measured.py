"""Facts from the files of a finished run or comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes
from latecomer.study.advice.facts import Measured, Run
from latecomer.study.advice.scenario import offline_share
from latecomer.study.config import load_config
from latecomer.study.learning_rate import rate_problem
from latecomer.study.metric_names import need_accuracy
from latecomer.study.results import Comparison, Result, read_json
from latecomer.study.view.history import History, read_history

RARE_SHARE = 0.2  # of the devices: those with fewest updates
LAST_PART = 0.8  # of a run's time, from which its final accuracy is averaged


def last_part(rows: pd.DataFrame, column: str) -> float:
    """The mean of `column` over the last fifth of virtual time; nan without evaluations there."""
    end = rows["virtual_seconds"].iloc[-1]
    return float(rows.loc[rows["virtual_seconds"] >= LAST_PART * end, column].mean())


def measured(result: Result) -> Run:
    """The facts of a finished run."""
    if not (result.folder / "summary.json").is_file():
        raise BadInput(
            f"{result.folder}: the run is not finished; finish it with"
            f" `latecomer run --resume {result.folder}`, or give its config.toml"
        )
    need_accuracy(result.summary, "latecomer advise")
    summary, history = result.summary, read_history(result.folder / "events.jsonl")
    config, rows = load_config(result.folder / "config.toml"), result.metrics
    tasks = max(1, summary["updates"] + summary["refused"] + summary["dropped"])
    refused, lr = summary["refused"] / tasks, config.training.lr
    return Run(
        strategy=summary["strategy"],
        lr=lr,
        rate=rate_problem(rows["loss"].tolist(), refused, summary["distance"], lr, ended=True),
        **_curve(rows["virtual_seconds"], rows["accuracy"]),
        accuracy=last_part(rows, "accuracy"),
        local=summary["client_accuracy"]["mean"],
        **_local_accuracy(result.folder, history),
        dropped=summary["dropped"] / tasks,
        idle=_idle(history, read_json(result.folder / "fleet.json")),
        staleness=summary["staleness"]["mean"],
        retired=(summary["epsilon"] or {}).get("retired", 0) / max(1, len(history.devices)),
        megabytes_up=summary["bytes"]["up"] / 1e6,
    )


def _curve(time: "pd.Series[float]", accuracy: "pd.Series[float]") -> dict[str, Any]:
    end = float(time.iloc[-1])
    before = accuracy[(time >= 0.65 * end) & (time <= 0.75 * end)]
    return {
        "dip": float((accuracy.cummax() - accuracy)[time >= 0.5 * end].max()),
        "gain": float(accuracy[time >= 0.9 * end].mean() - before.mean()) if len(before) else 0.0,
    }


def _local_accuracy(folder: Path, history: History) -> dict[str, Any]:
    """Mean local test accuracy of late devices, or those with few updates, and of the others."""
    try:
        table = pd.read_csv(folder / "devices.csv")
        table = table[(table["examples"] > 0) & table["accuracy"].notna()]
        late, who = table["late"] == 1, "Late devices"
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder / 'devices.csv'}: cannot be read: {error}") from error
    if not late.any():
        updates = table["device"].map(lambda device: history.updates.get(device, 0))
        # A device is rare only if it also has fewer than half the median number of updates.
        late = updates.rank(method="first") <= RARE_SHARE * len(table)
        late, who = late & (updates < 0.5 * updates.median()), "Devices with few updates"
    if not late.any() or late.all():
        return {}
    means = table.groupby(late)["accuracy"].mean()
    return {"late_are": who, "local_late": float(means[True]), "local_others": float(means[False])}


def _idle(history: History, fleet: Mapping[str, Any]) -> float:
    """The share of device time that is online and without a task."""
    tasks, devices = history.tasks, max(1, len(history.devices))
    whole = np.array(tasks.ended) - np.array(tasks.sent)
    spans = np.sum([np.array(column) for column in tasks.spans], axis=0)
    # A task that was lost, or has no spans in the log, counts from dispatch to its end.
    working = float(np.where(np.isnan(spans), whole, spans).sum())
    working += sum(history.now - sent for _, sent in history.open.values())
    offline = sum(offline_share(windows, period) for period, windows in fleet["windows"].values())
    total = history.now * devices
    return min(1.0, max(0.0, 1 - working / total - offline / devices)) if total else 0.0


def comparison_results(comparison: Comparison) -> tuple[tuple[Measured, ...], Result]:
    """Every strategy's accuracy, best mean first, and the first run of the best.

    References (no delays, pooled data) are not deployable and count only without other strategies.
    """
    table = comparison.table
    if missing := {"strategy", "seed", "accuracy"} - set(table):
        raise BadInput(f"{comparison.folder}: compare.csv has no {', '.join(sorted(missing))}")
    references = {r.name for r in recipes().values() if r.pooled or r.punctual}
    deployable = table[~table["strategy"].isin(references)]
    groups = (table if deployable.empty else deployable).groupby("strategy", sort=False)
    found = [
        Measured(str(name), float(a.mean()), float(a.std()), len(a))
        for name, a in groups["accuracy"]
    ]
    found.sort(key=lambda each: each.accuracy, reverse=True)
    runs, best = comparison.runs, found[0].strategy
    return tuple(found), runs[best, min(seed for name, seed in runs if name == best)]

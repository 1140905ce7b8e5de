"""Facts from the files of a finished run or comparison."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes
from latecomer.study.advice.facts import ComparisonOutcome, Run
from latecomer.study.advice.scenario import offline_share
from latecomer.study.config import load_config
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
    summary, history = result.summary, read_history(result.folder / "events.jsonl")
    config = load_config(result.folder / "config.toml")
    local = _local_accuracy(result.folder, history)
    late, fleet = set(summary["late_devices"]), read_json(result.folder / "fleet.json")
    received = max(1, summary["updates"] + summary["refused"])
    dropped = summary["dropped"] / max(1, received + summary["dropped"])
    retired = (summary["epsilon"] or {}).get("retired", 0) / max(1, len(history.devices))
    return Run(
        strategy=summary["strategy"],
        lr=config.training.lr,
        chance=1 / max(1, len(summary["f1"])),
        **_curve(result.metrics),
        local_mean=summary["client_accuracy"]["mean"],
        local_worst=summary["client_accuracy"]["worst"],
        **local,
        refused=summary["refused"] / received,
        dropped=dropped,
        idle=_idle(history, fleet),
        staleness_mean=summary["staleness"]["mean"],
        staleness_p90=_quantile(history.staleness, 0.9),
        staleness_max=summary["staleness"]["max"],
        late_updates=_share_of(history.updates, late),
        late_weight=_share_of(history.weights, late),
        retired=retired,
        clusters=(summary["clusters"] or {}).get("final"),
        megabytes_up=summary["bytes"]["up"] / 1e6,
        **_compensation(summary, history),
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


def _local_accuracy(folder: Path, history: History) -> dict[str, Any]:
    """Mean local test accuracy of late devices, of devices with few updates, and of the others."""
    try:
        table = pd.read_csv(folder / "devices.csv")
        table = table[(table["examples"] > 0) & table["accuracy"].notna()]
        is_late = table["late"] == 1
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder / 'devices.csv'}: cannot be read: {error}") from error
    updates = table["device"].map(lambda device: history.updates.get(device, 0))
    # A device is rare only if it also has fewer than half the median number of updates.
    rare = updates.rank(method="first") <= RARE_SHARE * len(table)
    rare &= updates < 0.5 * updates.median()
    return {
        "local_late": _mean(table.loc[is_late, "accuracy"]),
        "local_others": _mean(table.loc[~is_late, "accuracy"]),
        "local_rare": _mean(table.loc[rare, "accuracy"]),
        "local_frequent": _mean(table.loc[~rare, "accuracy"]),
    }


def _mean(values: "pd.Series[Any]") -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(counts: Mapping[int, int], share: float) -> int:
    """The `share` quantile of a histogram (value -> count); 0 if it is empty."""
    left = share * sum(counts.values())
    for value, count in sorted(counts.items()):
        left -= count
        if left <= 0:
            return value
    return 0


def _share_of(by_device: Mapping[int, float], chosen: Iterable[int]) -> float | None:
    """The share of these devices in the sum over all; None without devices or with a zero sum."""
    total, devices = sum(by_device.values()), list(chosen)
    if not devices or not total:
        return None
    return sum(by_device.get(device, 0) for device in devices) / total


def _idle(history: History, fleet: Mapping[str, Any]) -> float:
    """The share of device time that is online and without a task."""
    tasks, devices = history.tasks, max(1, len(history.devices))
    whole = np.array(tasks.ended) - np.array(tasks.sent)
    spans = np.sum([np.array(column) for column in tasks.spans], axis=0)
    # A task that was lost, or has no spans in the log, counts from dispatch to its end.
    working = float(np.where(np.isnan(spans), whole, spans).sum())
    working += sum(history.now - sent for _, sent in history.open.values())
    offline = sum(offline_share(windows, period) for period, windows in fleet["windows"].values())
    offline /= devices
    total = history.now * devices
    return min(1.0, max(0.0, 1 - working / total - offline)) if total else 0.0


def _compensation(summary: Mapping[str, Any], history: History) -> dict[str, Any]:
    found = summary["compensation"]
    if found is None:
        return {}
    better = [
        v["error_estimate"] is not None and v["error_estimate"] < v["error_stale"]
        for v in history.validations
        if v.get("error_stale") is not None
    ]
    at, versions = found["switched_at"], max(1, summary["versions"])
    return {
        "compensated": found["count"],
        "compensation_load": found["seconds"] / max(summary["virtual_seconds"], 1e-9),
        "compensation_better": sum(better) / len(better) if better else None,
        "switched_after": None if at is None else at / versions,
    }


def comparison_outcome(comparison: Comparison) -> tuple[ComparisonOutcome, Result]:
    """The strategy with the best mean accuracy, its margin over the second, and its first run.

    References (no delays, pooled data) are not deployable and win only without other strategies.
    """
    table = comparison.table
    if missing := {"strategy", "seed", "accuracy"} - set(table):
        raise BadInput(f"{comparison.folder}: compare.csv has no {', '.join(sorted(missing))}")
    by_seed = table.pivot(index="seed", columns="strategy", values="accuracy")
    order = by_seed.mean().sort_values(ascending=False, kind="stable").index.tolist()
    references = {r.name for r in recipes().values() if r.pooled or r.punctual}
    winner, second, *_ = [*([n for n in order if n not in references] or order), ""]
    gaps = by_seed[winner] - (by_seed[second] if second else by_seed[winner])
    spread = float(gaps.std()) if len(gaps) > 1 else None
    found = ComparisonOutcome(winner, second, float(gaps.mean()), spread, len(gaps))
    runs = comparison.runs
    return found, runs[winner, min(seed for name, seed in runs if name == winner)]

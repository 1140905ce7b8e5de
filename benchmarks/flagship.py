"""The studies of docs/studies/flagship.md: `latecomer` against all baselines in hard scenarios.

python benchmarks/flagship.py NAME [NAME ...] [--seeds 1,2,3] [--jobs 2] [--out DIR] [--charts DIR]

digits, mnist, uci-har, sp-sw-har, watch: phones, late devices that hold most of a class, weak
devices, concept shift in mid-run. uci-har-tied, sp-sw-har-tied, watch-tied: the same with that
class on late devices only. one-class: UCI HAR with one activity per phone. plain: digits
without these. worlds: half of the devices permute their labels. private: UCI HAR with an
epsilon of 10 for the whole run. parts: `latecomer` with one part off at a time. The learning rate
of every method is the best of two or three by accuracy on seed 4, which is in no table. All but
digits, plain, worlds and parts need ../shared/data.
"""

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from charts import line_chart
from studies import EXAMPLES, Runs, Settings, Study, arguments, by_method, curves, method, table

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
TUNED_ON = [4]
LAST = 0.75  # of the virtual time: metrics after it are averaged
BASELINES = (
    "fedavg",
    "fedadam",
    "oort",
    "semi-async",
    "weighted",
    "first-order",
    "w-pred",
    "asyn-tiers",
    "feddc",
    "safa",
    "fedsea",
    "fedasync",
    "feddc-fedasync",
    "fedbuff",
    "feddc-fedbuff",
    "robust-fedbuff",
    "ca2fl",
    "fadas",
    "asyncfeded",
    "aso-fed",
    "paflm",
    "privaasyncfed",
    "echopfl",
)
# The best of each family, for the scenarios beside the five datasets.
BEST_OF_FAMILY = (
    "fedavg",
    "semi-async",
    "feddc",
    "fedasync",
    "fedbuff",
    "feddc-fedbuff",
    "ca2fl",
    "asyncfeded",
    "echopfl",
)
OFF: dict[str, dict[str, Any]] = {
    "no compensation": {"compensate": False},
    "no surrogates": {"surrogates": False},
}
# Methods drawn by --charts.
DRAWN = ("latecomer", "ca2fl", "feddc", "fedbuff", "asyncfeded", "semi-async", "fedasync", "fedavg")
COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_affected": "late-class accuracy",
    "client_accuracy": "local test accuracy",
}
OURS: dict[str, dict[str, Any]] = {"latecomer": {}}


@dataclass(frozen=True)
class Scenario:
    """A config of examples/flagship with changed `settings`, run with several methods."""

    config: str
    rates: tuple[float, ...]
    devices: int
    target: float
    names: tuple[str, ...] = BASELINES
    settings: Settings = field(default_factory=dict)
    ours: Mapping[str, dict[str, Any]] = field(default_factory=lambda: OURS)

    def methods(self) -> dict[str, dict[str, Any]]:
        ours = {label: method("latecomer", **options) for label, options in self.ours.items()}
        return ours | {name: method(name, **self._options(name)) for name in self.names}

    def _options(self, name: str) -> dict[str, Any]:
        """Options whose default is for a hundred devices, or fails here (docs/strategies.md)."""
        size = max(2, self.devices // 10)
        match name:
            case "fedbuff" | "feddc-fedbuff":
                return {"size": size}
            case "robust-fedbuff":
                return {"size": size, "rule": "clip"}
            case "ca2fl":
                return {"size": size, "server_lr": size / self.devices}
            case "fadas":
                return {"size": max(2, size // 2)}
            case "asyncfeded":
                return {"lam": 0.1}
            case "paflm":
                return {"alpha": 1.0}
            case "safa":
                return {"lag": 30}
            case _:
                return {}


LATE_DIGITS = Scenario("flagship/digits.toml", (0.1, 0.25), 100, 0.85)
EASY = {
    "data.drift.kind": "none",
    "fleet.late.delay": 0,
    "fleet.profile": "tiers",
    "submodels.level": "none",
}
# By default these runs would not be compiled: their expected work is too small.
COMPILED = {"engine.kernel": "compiled"}
UCI_HAR = Scenario("flagship/uci-har.toml", (0.05, 0.15), 30, 0.85, settings=COMPILED)
SP_SW_HAR = Scenario("flagship/sp-sw-har.toml", (0.05, 0.15), 23, 0.8, settings=COMPILED)
WATCH = Scenario("flagship/watch.toml", (0.05, 0.15), 10, 0.7, settings=COMPILED)
# By subject every device has all activities: here one is on the late devices only.
TIED = {**COMPILED, "fleet.late.only": True}
SCENARIOS = {
    "digits": LATE_DIGITS,
    "mnist": Scenario("flagship/mnist.toml", (0.05, 0.15), 50, 0.7, settings=COMPILED),
    "uci-har": UCI_HAR,
    "sp-sw-har": SP_SW_HAR,
    "watch": WATCH,
    "uci-har-tied": replace(UCI_HAR, settings=TIED),
    "sp-sw-har-tied": replace(SP_SW_HAR, settings=TIED),
    "watch-tied": replace(WATCH, settings=TIED),
    "one-class": Scenario(
        "flagship/uci-har.toml",
        (0.02, 0.06),
        30,
        0.6,
        BEST_OF_FAMILY,
        settings={
            **COMPILED,
            "data.partition": "one-class",
            "data.per_device": 60,
            "data.drift.rate": 3.0,
            "fleet.devices": 30,
        },
    ),
    "plain": replace(LATE_DIGITS, names=BEST_OF_FAMILY, target=0.9, settings=EASY),
    "worlds": replace(
        LATE_DIGITS,
        names=("fedavg", "fedasync", "fedbuff", "echopfl", "clusterfl"),
        settings={
            **EASY,
            "data.drift.kind": "shift",
            "data.drift.begin": 30,
            "data.partition": "iid",
            "fleet.devices": 40,
        },
    ),
    "private": replace(
        UCI_HAR,
        rates=(0.01, 0.03, 0.1),
        target=0.6,
        names=(*BEST_OF_FAMILY, "dp-fedasync", "privaasyncfed"),
        settings={
            "privacy.epsilon": 10.0,
            "privacy.mode": "whole-run",
            "data.drift.kind": "none",
            "stop.virtual_seconds": 600.0,
        },
    ),
    "parts": replace(LATE_DIGITS, names=(), ours={"all": {}} | OFF),
}


def tuned(name: str, scenario: Scenario, args: argparse.Namespace) -> dict[str, float]:
    """The best learning rate of every method; rates of an earlier call are reused."""
    path = Path(args.out) / f"{name}-rates.json"
    known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    missing = {name: how for name, how in scenario.methods().items() if name not in known}
    if not missing:
        return known
    methods = {
        f"{label}@{rate:g}": {**changes, "training": {"lr": rate}}
        for label, changes in missing.items()
        for rate in scenario.rates
    }
    tuning = argparse.Namespace(out=args.out, jobs=args.jobs, seeds=TUNED_ON)
    study = Study(scenario.config, methods, {f"tuning {len(known)}": _settings(scenario)})
    found = by_method(study.run(name, f"tuning {len(known)}", tuning))
    scores = {
        label: measures(runs[0], scenario.target)["accuracy"] for label, runs in found.items()
    }
    for label in missing:
        known[label] = max(scenario.rates, key=lambda rate, of=label: scores[f"{of}@{rate:g}"])
    path.write_text(json.dumps(known, indent=2))
    return known


def _settings(scenario: Scenario) -> dict[str, Any]:
    tree = tomllib.loads((EXAMPLES / scenario.config).read_text())
    path = tree["data"].get("path")
    where = {"data.path": str(Path(os.environ["LATECOMER_DATA"]) / path)} if path else {}
    return {"evaluate.clients": True, **where, **scenario.settings}


def measures(run: Any, target: float) -> dict[str, float]:
    """The columns of the tables, for one run."""
    metrics, summary = run.metrics, run.summary
    time = metrics["virtual_seconds"]
    last = metrics[time >= LAST * time.iloc[-1]]
    each = pd.read_csv(run.folder / "devices.csv")["accuracy"].dropna().sort_values()
    tenth = each.head(max(1, len(each) // 10)).mean()
    reached = time[metrics["accuracy"] >= target]
    epsilon = (summary["epsilon"] or {}).get("mean")
    found = {
        "accuracy": last["accuracy"].mean(),
        "late-class accuracy": last["accuracy_affected"].mean(),
        "late-class accuracy, mean over time": mean_over_time(time, metrics["accuracy_affected"]),
        "local test accuracy": last["client_accuracy"].mean(),
        "worst device": last["client_accuracy_worst"].mean(),
        "worst tenth": tenth,
        "late devices": summary["client_accuracy"]["late_mean"],
        f"s to {target:g}": reached.min(),
        "MB up": summary["bytes"]["up"] / 1e6,
        "MB down": summary["bytes"]["down"] / 1e6,
    }
    return found | ({"epsilon": epsilon} if epsilon else {})


def mean_over_time(time: "pd.Series[float]", values: "pd.Series[float]") -> float:
    """The mean of a metric over the virtual time of the whole run."""
    return float(np.trapezoid(values, time) / (time.iloc[-1] - time.iloc[0]))


def study(name: str, args: argparse.Namespace) -> tuple[Runs, str]:
    scenario = SCENARIOS[name]
    rates = tuned(name, scenario, args)
    methods = {
        label: {**changes, "training": {"lr": rates[label]}}
        for label, changes in scenario.methods().items()
    }
    runs = Study(scenario.config, methods, {"": _settings(scenario)}).run(name, "", args)
    rows = {
        f"`{label}` ({rates[label]:g})": [measures(each, scenario.target) for each in found]
        for label, found in by_method(runs).items()
    }
    ours = len(scenario.ours)
    first, rest = list(rows)[:ours], list(rows)[ours:]
    rest.sort(key=lambda label: -pd.Series([row["accuracy"] for row in rows[label]]).mean())
    digits = {"s to": 0, "MB": 0}
    shown = {label: rows[label] for label in [*first, *rest]}
    return runs, table(shown, digits | dict.fromkeys(("acc", "late", "local", "worst", "eps"), 3))


def draw(name: str, runs: Runs, folder: Path) -> None:
    some = {key: run for key, run in runs.items() if key[0] in DRAWN}
    for column, what in COLUMNS.items():
        path = folder / f"flagship-{name}-{column.replace('_', '-')}.svg"
        lines = curves(some, column, "virtual_seconds")
        line_chart(path, f"{name}: {what}", "virtual seconds", what, lines)


def main() -> None:
    parser = arguments(__doc__ or "", SCENARIOS, "runs/flagship")
    args = parser.parse_args()
    os.environ.setdefault("LATECOMER_DATA", str(DATA))
    Path(args.out).mkdir(parents=True, exist_ok=True)
    for name in args.names:
        runs, text = study(name, args)
        print(f"\n## {name}\n\n{text}\n", flush=True)
        if args.charts:
            draw(name, runs, Path(args.charts))


if __name__ == "__main__":
    main()

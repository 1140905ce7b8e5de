"""The studies of docs/studies/feddc.md: whole federations, every method on the same scenario.

python benchmarks/feddc.py NAME [NAME ...] [--seeds 1,2,3] [--jobs 2] [--out DIR] [--charts DIR]

Each NAME runs the same data, fleet and seeds under several methods, prints a table (mean and
standard deviation over seeds) and draws the curves. Finished runs are not repeated: an
interrupted study is resumed. Columns: means from the epoch in which the first late update
arrives; "later" from twice that; "end" over the last tenth. Studies named uci-har*, busy* and
mnist* need ../shared/data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from charts import line_chart
from studies import Study, arguments, by_method, curves, method, table

EPOCH = 10.0  # virtual seconds of an epoch on the uniform fleet that all these studies use

# Methods drawn in the charts; more lines could not be read.
CHARTED = (
    "unstale (oracle)",
    "unweighted",
    "weighted",
    "first-order, 400",
    "w-pred, 40",
    "asyn-tiers, 2",
    "feddc",
    "feddc with surrogates",
)

# First-order and W-Pred are given several strengths, Weighted a milder discount, and the best
# counts: a claim against a badly set baseline is none.
BASELINES = {
    "unstale (oracle)": method("unstale"),
    "unweighted": method("semi-async"),
    "weighted": method("weighted"),
    "weighted, b 40": method("weighted", b=40.0),
    "first-order, 4": method("first-order", lam=4.0),
    "first-order, 40": method("first-order", lam=40.0),
    "first-order, 400": method("first-order", lam=400.0),
    "w-pred, 4": method("w-pred", lam=4.0),
    "w-pred, 40": method("w-pred", lam=40.0),
    "w-pred, 400": method("w-pred", lam=400.0),
    "asyn-tiers, 2": method("asyn-tiers", tiers=2),
    "asyn-tiers, 3": method("asyn-tiers", tiers=3),
}
FEDDC = {"feddc": method("feddc"), "feddc, no catch-up": method("feddc", catch_up=0.0)}
SHORT = {
    name: BASELINES[name]
    for name in ("unstale (oracle)", "unweighted", "weighted", "first-order, 400")
} | FEDDC


@dataclass(frozen=True)
class Race(Study):
    """`target` is the accuracy on the late class that is to be reached."""

    target: float = 0.8


DELAYS = {
    "gamma 2": {"fleet.late.delay": {"gamma": 2.0}},
    "gamma 5": {"fleet.late.delay": {"gamma": 5.0}},
    "gamma 10": {"fleet.late.delay": {"gamma": 10.0}},
    "fixed 10": {"fleet.late.delay": 10.0},
    "fixed 40": {"fleet.late.delay": 40.0},
    "fixed 100": {"fleet.late.delay": 100.0, "stop.epochs": 240},
}
ALPHAS = {
    "alpha 1": {"data.alpha": 1.0},
    "alpha 0.1": {"data.alpha": 0.1},
    "alpha 0.01": {"data.alpha": 0.01},
    "one class each": {"data.partition": "one-class"},
}
AWAY = {
    name: BASELINES[name]
    for name in ("unstale (oracle)", "unweighted", "weighted", "weighted, b 40")
} | {
    "first-order, 400": BASELINES["first-order, 400"],
    "asyn-tiers, 2": BASELINES["asyn-tiers, 2"],
    "fedasync": method("fedasync"),
    "fedbuff": method("fedbuff"),
    **FEDDC,
    "feddc with surrogates": method("feddc", surrogates=True),
}
FEDDC_OPTIONS = {
    **FEDDC,
    "catch-up 3": method("feddc", catch_up=3.0),
    "gate nearest": method("feddc", gate="nearest"),
    "gate off": method("feddc", gate="off"),
    "no reuse": method("feddc", reuse=0.0),
    "no switch": method("feddc", switch=False),
    "fade 0": method("feddc", fade=0.0),
    "fade 0.2": method("feddc", fade=0.2),
    "mask 0.25": method("feddc", mask=0.25),
    "mask 0.05": method("feddc", mask=0.05),
    "8 samples": method("feddc", samples=8),
    "64 samples": method("feddc", samples=64),
}
ASYNC = {
    "fedasync": method("fedasync"),
    "fedasync, constant": method("fedasync", decay="constant", alpha=0.05),
    "feddc-fedasync": method("feddc-fedasync"),
    "fedbuff": method("fedbuff"),
    "fedbuff, constant": method("fedbuff", decay="constant"),
    "feddc-fedbuff": method("feddc-fedbuff"),
}
BOTH = {"unweighted": BASELINES["unweighted"], **FEDDC}

STUDIES = {
    "uci-har": Race("feddc/uci-har.toml", BASELINES | FEDDC),
    "uci-har-class1": Race(
        "feddc/uci-har.toml", SHORT, points={"class 1 late": {"fleet.late.classes": [1]}}
    ),
    "uci-har-long": Race("feddc/uci-har.toml", SHORT, points={"": {"stop.epochs": 200}}),
    "busy": Race("feddc/busy.toml", AWAY),
    "busy-40": Race(
        "feddc/busy.toml",
        AWAY,
        points={"away for 40": {"fleet.late.delay": 40.0, "stop.epochs": 200}},
    ),
    "digits": Race("feddc/digits.toml", BASELINES | FEDDC),
    "digits-delays": Race("feddc/digits.toml", SHORT, points=DELAYS),
    "digits-alphas": Race("feddc/digits.toml", SHORT, points=ALPHAS),
    "digits-options": Race("feddc/digits.toml", FEDDC_OPTIONS),
    "uci-har-options": Race("feddc/uci-har.toml", FEDDC_OPTIONS, points={"": {"stop.epochs": 200}}),
    "digits-rates": Race(
        "feddc/digits.toml",
        {
            name: BASELINES[name]
            for name in ("unstale (oracle)", "unweighted", "first-order, 40", "w-pred, 40")
        }
        | FEDDC,
        points={f"lr {rate}": {"training.lr": rate} for rate in (0.01, 0.02, 0.1)},
    ),
    "digits-async": Race("feddc/digits.toml", ASYNC),
    "digits-optimisers": Race(
        "feddc/digits.toml",
        BOTH,
        points={
            "sgd": {"training.momentum": 0.0},
            "momentum": {},
            "weight decay": {"training.weight_decay": 0.01},
            "prox": {"training.prox": 0.1},
            "adam": {"training.optimizer": "adam", "training.lr": 0.001},
        },
    ),
    "digits-devices": Race(
        "feddc/digits.toml",
        BOTH,
        points={
            f"{n} devices": {"fleet.devices": n, "fleet.late.devices": n // 10}
            for n in (50, 100, 200, 300)
        },
    ),
    "mnist": Race(
        "feddc/mnist.toml",
        {
            name: (BASELINES | FEDDC)[name]
            for name in (
                "unstale (oracle)",
                "unweighted",
                "feddc",
                "first-order, 400",
                "w-pred, 40",
            )
        },
    ),
}


def delay_of(tree: Mapping[str, Any]) -> float:
    """The mean delay of the late devices, in epochs."""
    delay = tree["fleet"]["late"]["delay"]
    return float(delay["gamma"] if isinstance(delay, dict) else delay)


def measures(metrics: pd.DataFrame, delay: float, target: float) -> dict[str, float]:
    """The columns of one run; epochs are virtual time, which is the same for every method."""
    epochs = metrics["virtual_seconds"] / EPOCH
    arrived, tail = metrics[epochs > delay], metrics[epochs > 2 * delay]
    end = metrics[epochs > 0.9 * epochs.iloc[-1]]
    reached = epochs[metrics["accuracy_affected"] >= target]
    return {
        "late class": arrived["accuracy_affected"].mean(),
        "late class, later": tail["accuracy_affected"].mean(),
        "late class, end": end["accuracy_affected"].mean(),
        "accuracy": arrived["accuracy"].mean(),
        "accuracy, later": tail["accuracy"].mean(),
        "accuracy, end": end["accuracy"].mean(),
        f"epochs to {target:g}": reached.iloc[0] if len(reached) else np.nan,
    }


def compensations(label: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Count and cost of compensation in one line; empty where there is none."""
    some = [summary for summary in summaries if summary["compensation"]]
    if not some:
        return ""
    count = np.mean([s["compensation"]["count"] for s in some])
    share = np.mean([s["compensation"]["seconds"] / s["virtual_seconds"] for s in some])
    ends = [s["compensation"]["switched_at"] for s in some]
    off = ", ".join("never" if end is None else str(end) for end in ends)
    return f"- {label}: {count:.0f} compensated, {share:.2%} of the virtual time, ended at: {off}"


def main() -> None:
    args = arguments(__doc__, STUDIES, "runs/feddc").parse_args()
    for name in args.names:
        study = STUDIES[name]
        for point in study.points:
            runs, delay = study.run(name, point, args), delay_of(study.tree(point))
            found = by_method(runs)
            rows = {
                label: [measures(result.metrics, delay, study.target) for result in results]
                for label, results in found.items()
            }
            heading = f"{name}{', ' + point if point else ''}"
            costs = [
                compensations(label, [r.summary for r in some]) for label, some in found.items()
            ]
            cells = table(rows, {"late": 3, "accuracy": 3})
            print(f"\n### {heading}\n\n{cells}\n", *filter(None, costs), sep="\n", flush=True)
            if args.charts:
                path = Path(args.charts) / ("-".join([name, *point.split()]) + ".svg")
                lines = curves(runs, "accuracy_affected", "virtual_seconds", EPOCH)
                lines = {label: lines[label] for label in CHARTED if label in lines} or lines
                line_chart(path, heading, "epoch", "late-class accuracy", lines)


if __name__ == "__main__":
    main()

"""The studies of docs/studies/feddc.md: whole federations, every method on the same scenario.

python benchmarks/feddc.py NAME [NAME ...] [--seeds 1,2,3] [--jobs 2] [--out DIR] [--charts DIR]

Each NAME runs the same data, fleet and seeds under several methods, prints a table (mean and
standard deviation over seeds) and draws the curves. Finished runs are not repeated: a study that
was cut short goes on where it was. Columns: means from the epoch in which the first late update
arrives; "later" from twice that; "end" over the last tenth. Studies named uci-har*, busy* and
mnist* need ../shared/data.
"""

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from charts import line_chart

EXAMPLES = Path(__file__).parent.parent / "examples" / "feddc"
EPOCH = 10.0  # virtual seconds of an epoch on the uniform fleet that all these studies use

# More lines than this nobody can read in one chart.
CHARTED = (
    "unstale (oracle)",
    "unweighted",
    "weighted",
    "first-order, 400",
    "w-pred, 40",
    "asyn-tiers, 2",
    "feddc",
    "feddc with stand-ins",
)

Settings = Mapping[str, Any]  # dotted keys


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, **options}}


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
class Study:
    """A scenario, changed at each of `points`, under `methods`."""

    config: str
    methods: Mapping[str, dict[str, Any]]
    points: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})
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
    "feddc with stand-ins": method("feddc", stand_in=True),
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
    "keep 0.25": method("feddc", keep=0.25),
    "keep 0.05": method("feddc", keep=0.05),
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
    "uci-har": Study("uci-har.toml", BASELINES | FEDDC),
    "uci-har-class1": Study(
        "uci-har.toml", SHORT, points={"class 1 late": {"fleet.late.classes": [1]}}
    ),
    "uci-har-long": Study("uci-har.toml", SHORT, points={"": {"stop.epochs": 200}}),
    "busy": Study("busy.toml", AWAY),
    "busy-40": Study(
        "busy.toml",
        AWAY,
        points={"away for 40": {"fleet.late.delay": 40.0, "stop.epochs": 200}},
    ),
    "digits": Study("digits.toml", BASELINES | FEDDC),
    "digits-delays": Study("digits.toml", SHORT, points=DELAYS),
    "digits-alphas": Study("digits.toml", SHORT, points=ALPHAS),
    "digits-options": Study("digits.toml", FEDDC_OPTIONS),
    "uci-har-options": Study("uci-har.toml", FEDDC_OPTIONS, points={"": {"stop.epochs": 200}}),
    "digits-rates": Study(
        "digits.toml",
        {
            name: BASELINES[name]
            for name in ("unstale (oracle)", "unweighted", "first-order, 40", "w-pred, 40")
        }
        | FEDDC,
        points={f"lr {rate}": {"training.lr": rate} for rate in (0.01, 0.02, 0.1)},
    ),
    "digits-async": Study("digits.toml", ASYNC),
    "digits-optimisers": Study(
        "digits.toml",
        BOTH,
        points={
            "sgd": {"training.momentum": 0.0},
            "momentum": {},
            "weight decay": {"training.weight_decay": 0.01},
            "prox": {"training.prox": 0.1},
            "adam": {"training.optimizer": "adam", "training.lr": 0.001},
        },
    ),
    "digits-devices": Study(
        "digits.toml",
        BOTH,
        points={
            f"{n} devices": {"fleet.devices": n, "fleet.late.devices": n // 10}
            for n in (50, 100, 200, 300)
        },
    ),
    "mnist": Study(
        "mnist.toml",
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


def tree_of(study: Study, settings: Settings) -> dict[str, Any]:
    """The study's config, with the point's settings and a section for each method."""
    tree: dict[str, Any] = tomllib.loads((EXAMPLES / study.config).read_text())
    if "path" in tree["data"]:
        tree["data"]["path"] = str(EXAMPLES.parent.parent / tree["data"]["path"])
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    tree["compare"] = {label: dict(changes) for label, changes in study.methods.items()}
    return tree


def run_point(name: str, point: str, args: argparse.Namespace) -> dict[tuple[str, int], Any]:
    """The finished runs of one point by method and seed."""
    import latecomer

    study = STUDIES[name]
    folder = Path(args.out) / "-".join([name, *point.split()]).replace("/", "-")
    if (folder / "compare.csv").exists():
        return dict(latecomer.load(folder).runs)
    if folder.exists():
        from latecomer.study.compare import resume_comparison

        resume_comparison(folder, jobs=args.jobs)
    else:
        tree = tree_of(study, study.points[point])
        latecomer.compare(tree, list(study.methods), seeds=args.seeds, out=folder, jobs=args.jobs)
    return dict(latecomer.load(folder).runs)


def delay_of(tree: Mapping[str, Any]) -> float:
    """By how many epochs the late ones are late, in the mean."""
    delay = tree["fleet"]["late"]["delay"]
    return float(delay["gamma"] if isinstance(delay, dict) else delay)


def measures(metrics: pd.DataFrame, delay: float, target: float) -> dict[str, float]:
    """What is told of one run; epochs are virtual time, which is the same for every method."""
    epochs = metrics["virtual_seconds"] / EPOCH
    heard, tail = metrics[epochs > delay], metrics[epochs > 2 * delay]
    end = metrics[epochs > 0.9 * epochs.iloc[-1]]
    reached = epochs[metrics["accuracy_affected"] >= target]
    return {
        "affected": heard["accuracy_affected"].mean(),
        "affected, later": tail["accuracy_affected"].mean(),
        "affected, end": end["accuracy_affected"].mean(),
        "accuracy": heard["accuracy"].mean(),
        "accuracy, later": tail["accuracy"].mean(),
        "accuracy, end": end["accuracy"].mean(),
        f"epochs to {target:g}": reached.iloc[0] if len(reached) else np.nan,
    }


def repairs(label: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """What compensation took, in one line; empty where there is none."""
    some = [summary for summary in summaries if summary["compensation"]]
    if not some:
        return ""
    count = np.mean([s["compensation"]["count"] for s in some])
    share = np.mean([s["compensation"]["seconds"] / s["virtual_seconds"] for s in some])
    ends = [s["compensation"]["switched_at"] for s in some]
    told = ", ".join("never" if end is None else str(end) for end in ends)
    return f"- {label}: {count:.0f} repaired, {share:.2%} of the virtual time, switched off: {told}"


def table(rows: Mapping[str, list[dict[str, float]]]) -> str:
    """Markdown: mean and standard deviation over seeds; how many seeds if not all reached it."""
    columns = list(next(iter(rows.values()))[0])
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for label, runs in rows.items():
        cells = []
        for column in columns:
            values = np.array([run[column] for run in runs], dtype=float)
            known = values[~np.isnan(values)]
            if not len(known):
                cells.append("-")
                continue
            digits = 3 if column.startswith(("affected", "accuracy")) else 1
            spread = f" ± {known.std(ddof=1):.{digits}f}" if len(known) > 1 else ""
            some = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
            cells.append(f"{known.mean():.{digits}f}{spread}{some}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(
    runs: Mapping[tuple[str, int], Any], column: str
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Mean, lowest and highest over seeds on a common grid of epochs, per method."""
    of_method: dict[str, list[pd.DataFrame]] = {}
    for (label, _), result in runs.items():
        of_method.setdefault(label, []).append(result.metrics)
    lines = {}
    for label, several in of_method.items():
        end = min(m["virtual_seconds"].iloc[-1] for m in several) / EPOCH
        grid = np.linspace(0, end, 81)
        values = np.stack(
            [np.interp(grid, m["virtual_seconds"] / EPOCH, m[column]) for m in several]
        )
        lines[label] = list(
            zip(
                grid.tolist(),
                values.mean(0).tolist(),
                values.min(0).tolist(),
                values.max(0).tolist(),
                strict=True,
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(STUDIES), metavar="NAME")
    parser.add_argument("--seeds", default="1,2,3", type=lambda t: [int(s) for s in t.split(",")])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", default="runs/feddc")
    parser.add_argument("--charts", default="")
    args = parser.parse_args()
    for name in args.names:
        study = STUDIES[name]
        for point in study.points:
            runs = run_point(name, point, args)
            delay = delay_of(tree_of(study, study.points[point]))
            rows: dict[str, list[dict[str, float]]] = {}
            summaries: dict[str, list[Mapping[str, Any]]] = {}
            for (label, _), result in runs.items():
                rows.setdefault(label, []).append(measures(result.metrics, delay, study.target))
                summaries.setdefault(label, []).append(result.summary)
            heading = f"{name}{', ' + point if point else ''}"
            told = [repairs(label, some) for label, some in summaries.items()]
            print(f"\n### {heading}\n\n{table(rows)}\n", *filter(None, told), sep="\n", flush=True)
            if args.charts:
                path = Path(args.charts) / ("-".join([name, *point.split()]) + ".svg")
                lines = curves(runs, "accuracy_affected")
                lines = {label: lines[label] for label in CHARTED if label in lines} or lines
                line_chart(path, heading, "epoch", "accuracy on the affected class", lines)


if __name__ == "__main__":
    main()

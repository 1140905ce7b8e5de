"""Three studies with other networks and targets than the rest: images, text, many labels.

python benchmarks/tasks.py run cifar --data DIR [--seeds 1,2,3] [--out DIR]
python benchmarks/tasks.py run shakespeare --data DIR
python benchmarks/tasks.py run extrasensory --data DIR
python benchmarks/tasks.py page                  docs/studies/tasks.md and its charts

DIR of `--data` has cifar10.npz, tinyshakespeare.txt and the folder extrasensory. `run` adds or
replaces rows in docs/studies/tasks.csv: one row per run and evaluation. A run that is finished
in the folder of `--out` is not repeated. `page` needs tasks.csv only.
"""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from charts import Line, line_chart
from studies import spread
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/studies"
PAGE, RESULTS = FOLDER / "tasks.md", FOLDER / "tasks.csv"
BEGIN, END = "<!-- {}: written by: python benchmarks/tasks.py page -->", "<!-- end of {} -->"
COLUMNS = ["study", "method", "seed", "updates", "virtual_seconds", "score", "second"]
LAST, SECOND_HALF = 0.75, 0.5  # shares of the virtual time of a run
GRID = 201  # moments at which a run is read
T_95 = {2: 12.706, 3: 4.303}  # Student's t by number of seeds, two-sided 95%


class Residual(nn.Module):
    """relu(f(x) + s(x)): f has two 3x3 convolutions, s is the identity or a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        short = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A ResNet of three residual blocks with 16, 32 and 64 channels and BatchNorm, on half size."""
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(input_shape[0], 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


@dataclass(frozen=True)
class Study:
    """One scenario, its methods, and the two metrics of its table.

    `methods`: label -> the settings that differ. `lower`: whether smaller scores are better.
    `uncharted`: methods that are not in the chart over virtual time.
    """

    title: str
    tree: Mapping[str, Mapping[str, Any]]
    methods: Mapping[str, Mapping[str, Any]]
    metrics: tuple[str, str]
    names: tuple[str, str]
    ticks: tuple[float, ...]
    lower: bool = False
    uncharted: tuple[str, ...] = ()

    def config(self, label: str, seed: int, data: Path) -> dict[str, Any]:
        """The config of one run; `data` is the folder of the data."""
        tree = {"seed": seed, **{name: dict(table) for name, table in self.tree.items()}}
        for name, table in self.methods[label].items():
            tree[name] = {**tree.get(name, {}), **table}
        tree["data"]["path"] = str(data / tree["data"]["path"])
        return tree


def strategy(name: str) -> dict[str, Any]:
    return {"strategy": {"name": name}}


TIERS = {"profile": "tiers"}
STUDIES = {
    "cifar": Study(
        title="BatchNorm ResNet on CIFAR-10",
        tree={
            "data": {
                "source": "npz",
                "path": "cifar10.npz",
                "partition": "dirichlet",
                "alpha": 1.0,
                "test": "official",
                "per_device": 150,
            },
            "fleet": {**TIERS, "devices": 20},
            "model": {"name": "tasks:resnet"},
            "training": {"local_epochs": 1, "batch_size": 32, "lr": 0.1, "momentum": 0.5},
            "evaluate": {"every": 20, "examples": 1000},
            "stop": {"virtual_seconds": 180.0},
        },
        methods={
            **{name: strategy(name) for name in ("fedavg", "fedbuff", "ca2fl", "latecomer")},
            "fedbuff, local statistics": {**strategy("fedbuff"), "model": {"buffers": "local"}},
        },
        metrics=("accuracy", "loss"),
        names=("accuracy", "loss"),
        ticks=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    "shakespeare": Study(
        title="Next character, one device per speaker",
        tree={
            "data": {
                "source": "speakers:devices",
                "path": "tinyshakespeare.txt",
                "per_device": 20,
            },
            "fleet": TIERS,
            "model": {"name": "speakers:NextCharacter"},
            "training": {"local_epochs": 1, "batch_size": 5, "lr": 0.5, "momentum": 0.5},
            "evaluate": {"every": 40, "examples": 300},
            "stop": {"updates": 400},
        },
        methods={name: strategy(name) for name in ("fedavg", "fedbuff", "latecomer")},
        metrics=("perplexity", "token_accuracy"),
        names=("perplexity", "accuracy of the next character"),
        ticks=(0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        lower=True,
    ),
    "extrasensory": Study(
        title="All 51 labels of ExtraSensory",
        tree={
            "data": {
                "source": "extrasensory",
                "path": "extrasensory",
                "label": "all",
                "partition": "by-subject",
            },
            "fleet": TIERS,
            "model": {"name": "mlp", "hidden": [64, 32]},
            "objective": {"loss": "binary-cross-entropy"},
            "training": {"local_epochs": 2, "batch_size": 128, "lr": 0.5, "momentum": 0.9},
            "evaluate": {"every": 10},
            "stop": {"updates": 200},
        },
        methods={
            "centralised": {
                **strategy("centralised"),
                "stop": {"updates": 20},
                "evaluate": {"every": 1},
            },
            **{name: strategy(name) for name in ("fedavg", "fedbuff", "latecomer")},
        },
        metrics=("macro_f1", "mean_average_precision"),
        names=("macro-F1", "mean average precision"),
        ticks=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
        uncharted=("centralised",),
    ),
}


def folder_of(label: str) -> str:
    return label.replace(",", "").replace(" ", "-")


def run(args: argparse.Namespace) -> None:
    """Run a study and put its rows into `RESULTS`."""
    import latecomer

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples/shakespeare"))
    study, rows = STUDIES[args.study], []
    for seed in args.seeds:
        for label in args.methods or study.methods:
            folder = args.out / args.study / f"{folder_of(label)}-{seed}"
            if not (folder / "summary.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                latecomer.run(study.config(label, seed, args.data), folder)
            print(folder, flush=True)
            metrics = pd.read_csv(folder / "metrics.csv")
            row = metrics[["updates", "virtual_seconds"]].assign(
                study=args.study,
                method=label,
                seed=seed,
                score=metrics[study.metrics[0]].round(4),
                second=metrics[study.metrics[1]].round(4),
            )
            rows.append(row[COLUMNS].round({"virtual_seconds": 1}))
    known = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=COLUMNS)
    new, keys = pd.concat(rows), ["study", "method", "seed"]
    others = known[~known.set_index(keys).index.isin(new.set_index(keys).index)]
    together = pd.concat([others, new]).sort_values([*keys, "updates"], kind="stable")
    together.to_csv(RESULTS, index=False)


def along(run: pd.DataFrame, column: str, grid: np.ndarray) -> np.ndarray:
    """The values at the moments of `grid`; between two evaluations the earlier one counts."""
    places = np.searchsorted(run.virtual_seconds.to_numpy(), grid, side="right") - 1
    return run[column].to_numpy()[np.maximum(0, places)]


def scores(run: pd.DataFrame, lower: bool) -> dict[str, float]:
    """Both metrics in the last quarter of the time, and what the run did.

    worst fall: the largest distance from the best score so far, in the second half of the time.
    """
    grid = np.linspace(0, run.virtual_seconds.iloc[-1], GRID)
    score = along(run, "score", grid) * (-1 if lower else 1)
    fall = np.maximum.accumulate(score) - score
    last = grid >= LAST * grid[-1]
    return {
        "score": along(run, "score", grid)[last].mean(),
        "second": along(run, "second", grid)[last].mean(),
        "fall": fall[grid >= SECOND_HALF * grid[-1]].max(),
        "updates": run.updates.iloc[-1],
        "minutes": grid[-1] / 60,
    }


def table(study: Study, rows: pd.DataFrame) -> str:
    """One line per method: mean and standard deviation over its seeds."""
    heads = (
        "",
        *study.names,
        f"worst fall of {study.names[0]}",
        "updates",
        "virtual minutes",
        "seeds",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    digits = {"score": 3, "second": 3, "fall": 3, "updates": 0, "minutes": 1}
    if study.lower:
        digits |= {"score": 2, "fall": 2}
    for label, runs in by_method(study, rows).items():
        cells = [spread(runs[column], places) for column, places in digits.items()]
        cells.append(str(len(runs)))
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_method(study: Study, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """label -> the `scores` of its runs, one row per seed."""
    found = {}
    for label in study.methods:
        runs = rows[rows.method == label].groupby("seed")
        if len(runs):
            each = {seed: scores(run, study.lower) for seed, run in runs}
            found[label] = pd.DataFrame.from_dict(each, orient="index")
    return found


def reading(study: Study, rows: pd.DataFrame) -> str:
    """The best mean, and which other methods differ from it clearly over the common seeds.

    Clear: the 95% interval (Student's t) of the differences at equal seeds excludes 0.
    """
    runs = by_method(study, rows)
    sign = -1 if study.lower else 1
    best = max(runs, key=lambda label: sign * runs[label].score.mean())
    places = 2 if study.lower else 3
    found: dict[str, list[str]] = {
        "Clearly behind it": [],
        "Not clearly different from it": [],
        "Differences with a single seed": [],
    }
    clear, unclear, single = found.values()
    for label in runs:
        if label == best:
            continue
        gap = (runs[label].score - runs[best].score).dropna()
        text = f"`{label}` {gap.mean():+.{places}f}"
        if len(gap) == 1:
            single.append(text)
            continue
        wide = T_95[len(gap)] * gap.std(ddof=1) / len(gap) ** 0.5
        (clear if abs(gap.mean()) > wide else unclear).append(f"{text} ± {wide:.{places}f}")
    parts = [f"`{best}` has the {'lowest' if study.lower else 'highest'} mean {study.names[0]}."]
    parts += [f"{lead}: {', '.join(texts)}." for lead, texts in found.items() if texts]
    if clear or unclear:
        parts.append("(Differences at equal seeds, with 95% intervals.)")
    return " ".join(parts)


def chart(name: str, rows: pd.DataFrame, folder: Path) -> Path:
    """Draw the first metric over virtual time: mean and range over seeds."""
    study, lines = STUDIES[name], dict[str, Line]()
    for label in study.methods:
        runs = [run for _, run in rows[rows.method == label].groupby("seed")]
        if not runs or label in study.uncharted:
            continue
        grid = np.linspace(0, min(run.virtual_seconds.iloc[-1] for run in runs), GRID)
        values = np.stack([np.interp(grid, run.virtual_seconds, run.score) for run in runs])
        columns = (grid / 60, values.mean(0), values.min(0), values.max(0))
        lines[label] = list(zip(*(column.tolist() for column in columns), strict=True))
    path = folder / f"tasks-{name}.svg"
    seeds = rows.seed.nunique()
    title = f"{study.title}: " + (f"mean and range of {seeds} seeds" if seeds > 1 else "one seed")
    line_chart(path, title, "virtual minutes", study.names[0], lines, study.ticks)
    return path


def section(name: str, rows: pd.DataFrame) -> str:
    """What the page has of one study between its two comments."""
    study = STUDIES[name]
    picture = f"![{study.names[0]} over virtual time](tasks-{name}.svg)"
    return f"{table(study, rows)}\n\n{reading(study, rows)}\n\n{picture}"


def sections(page: str, results: pd.DataFrame) -> str:
    """`page` with the sections of all studies in `results`."""
    for name, rows in results.groupby("study"):
        before, _, rest = page.partition(BEGIN.format(name))
        after = rest.partition(END.format(name))[2]
        new = f"{BEGIN.format(name)}\n\n{section(str(name), rows)}\n\n{END.format(name)}"
        page = before + new + after
    return page


def write_page(args: argparse.Namespace) -> None:
    results = pd.read_csv(RESULTS)
    PAGE.write_text(sections(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    for name, rows in results.groupby("study"):
        chart(str(name), rows, FOLDER)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("study", choices=STUDIES)
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--seeds", default="1,2,3", type=lambda t: [int(s) for s in t.split(",")])
    runs.add_argument("--methods", default=[], type=lambda t: t.split(";"))
    runs.add_argument("--out", type=Path, default=Path("tasks"))
    runs.set_defaults(do=run)
    commands.add_parser("page").set_defaults(do=write_page)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()

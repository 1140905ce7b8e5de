"""The stress matrix: `latecomer` and eight other methods in many small, different settings.

python benchmarks/stress.py run [--part report|tune|quick] [--seeds 1,2,3] [--jobs 2] [--out DIR]
python benchmarks/stress.py table [--part report] [--out DIR]
python benchmarks/stress.py page [--part report] [--out DIR]   docs/studies/stress.md

A cell is one combination of partition, devices, learning rate, local epochs, momentum, model,
fleet and trouble; the cells cover every pair of values. All methods get the same settings, data,
fleet, seed and virtual time, in which a fleet that never waits makes `updates` updates. Nothing is
tuned per cell. Defaults of `latecomer` were chosen on the cells of part `tune`, with other seeds
than the table. Results are lines of DIR/results.jsonl; a run that is in it is not repeated. Cells
with MNIST, UCI HAR or CIFAR-10 need ../shared/data, the others use the digits of scikit-learn.
"""

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import nn

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
PAGE, RESULTS = ROOT / "docs/studies/stress.md", ROOT / "docs/studies/stress.csv"
BEGIN, END = "<!-- written by: python benchmarks/stress.py page -->", "<!-- end -->"
COLUMNS = ["cell", "method", "seed", "accuracy", "drop", "late", "cpu"]
OURS = "latecomer"
METHODS = (
    "latecomer",
    "fedavg",
    "fedbuff",
    "fedasync",
    "semi-async",
    "ca2fl",
    "feddc",
    "feddc-fedbuff",
    "asyncfeded",
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "partition": ("iid", 1.0, 0.1, 0.01, "one-class"),  # a number is the alpha of a Dirichlet
    "devices": (3, 10, 100, 500),
    "lr": (0.01, 0.03, 0.1, 0.3, 1.0),
    "epochs": (1, 5, 10),
    "momentum": (0.0, 0.9),
    "model": ("mlp", "cnn1d", "lenet", "resnet"),
    "fleet": ("uniform", "tiers", "phones"),
    "trouble": ("none", "late", "away", "dropout", "busy-server", "drift", "label-shift"),
}
SOURCES = {
    "mlp": ("digits", "mnist", "uci_har"),
    "cnn1d": ("uci_har",),
    "lenet": ("mnist", "mnist", "cifar10"),
    "resnet": ("mnist",),
}
# Fewer features and pixels, so that convolutions are fast.
THINNED = {"cnn1d": lambda x: x[:, ::4], "resnet": lambda x: x[:, ::2, ::2]}
MLP_SHARE = 0.6  # of the drawn cells, beside those that have an MLP by chance
CELLS = 132  # the first third of them is the part `tune`
ROWS = {3: 300, 10: 500, 100: 1200, 500: 1700}  # examples of all devices together
TEST_ROWS = 500  # examples of the central test set, which no device holds
BATCH = 32
# Examples processed and updates per run: the smaller number of updates counts.
MAX_EXAMPLES = {"mlp": 150_000, "cnn1d": 20_000, "lenet": 20_000, "resnet": 20_000}
MAX_UPDATES = {3: 150, 10: 300, 100: 1000, 500: 2000}
MIN_PASSES = 3  # updates per device, at least
TRAIN_SHARE = 0.64  # of the examples of a device
DELAY = 10  # epochs
SERVER_LOAD = 1.5  # of a busy server that merges every update at once
EVALUATIONS = 25
LAST, SECOND_HALF = 0.75, 0.5  # shares of the virtual time
QUICK = 6  # cells of the part `quick`: the cheapest with the digits


@dataclass(frozen=True)
class Cell:
    """One setting, the same for all methods."""

    number: int
    partition: Any
    devices: int
    lr: float
    epochs: int
    momentum: float
    model: str
    fleet: str
    trouble: str
    source: str

    @property
    def name(self) -> str:
        alpha = self.partition if isinstance(self.partition, str) else f"alpha {self.partition:g}"
        momentum = f", momentum {self.momentum:g}" if self.momentum else ""
        return (
            f"{self.number}: {self.source} {self.model}, {self.devices} {self.fleet}, {alpha},"
            f" lr {self.lr:g}{momentum}, {self.epochs} epochs, {self.trouble}"
        )

    @property
    def updates(self) -> int:
        """Updates of a fleet that never waits, within the virtual time of the cell."""
        per_task = TRAIN_SHARE * ROWS[self.devices] / self.devices * self.epochs
        most = min(MAX_UPDATES[self.devices], MAX_EXAMPLES[self.model] / per_task)
        return max(MIN_PASSES * self.devices, round(most))

    @property
    def subset(self) -> str:
        """The name of the file with its examples."""
        thinned = "-thinned" if self.model in THINNED else ""
        return f"{self.source}-{ROWS[self.devices]}{thinned}.npz"

    def tree(self, method: str, seed: int, data: Path) -> dict[str, Any]:
        """The config of a run, without its virtual time."""
        late = {"classes": [1], "devices": max(1, self.devices // 10), "delay": DELAY}
        kinds = {"late": {**late, "kind": "in-flight"}, "away": {**late, "kind": "busy"}}
        fleet: dict[str, Any] = {"devices": self.devices, "profile": self.fleet}
        if self.trouble in kinds:
            fleet["late"] = kinds[self.trouble]
        if self.trouble == "dropout":
            fleet["dropout"] = 0.3
        name, *options = method.split(" ", 1)
        strategy = {"name": name, **(json.loads(options[0]) if options else {})}
        return {
            "seed": seed,
            "data": self._data(data),
            "fleet": fleet,
            "model": {"name": "stress:small_resnet" if self.model == "resnet" else self.model},
            "training": {
                "lr": self.lr,
                "local_epochs": self.epochs,
                "momentum": self.momentum,
                "batch_size": BATCH,
            },
            "strategy": strategy,
            "evaluate": {
                "every": max(1, self.updates // EVALUATIONS),
                "examples": TEST_ROWS,
                "clients": self.trouble == "label-shift",
            },
            "engine": {"kernel": "batched"},
        }

    def _data(self, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {"source": "npz", "path": str(folder / self.subset)}
        found["test"] = "official"
        if isinstance(self.partition, str):
            found["partition"] = self.partition
        else:
            found |= {"partition": "dirichlet", "alpha": self.partition}
        if self.trouble == "drift":
            found["drift"] = {"kind": "grow", "first": 0.1}
        if self.trouble == "label-shift":
            found["drift"] = {"kind": "shift", "begin": 0.0, "share": 0.5}
        return found


def small_resnet(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """A ResNet of four 3x3 convolutions in two residual blocks, with GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, stride=2, padding=1),
        Block(8),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        Block(16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(inner)))


def cells() -> list[Cell]:
    """The cells: random ones, each of those drawn that covers most pairs not yet covered."""
    rng = np.random.default_rng(1)
    uncovered = {
        (a, va, b, vb)
        for a, b in combinations(FACTORS, 2)
        for va in FACTORS[a]
        for vb in FACTORS[b]
        if _possible({a: va, b: vb})
    }
    found: list[Cell] = []
    for number in range(CELLS):
        drawn = [_drawn(rng) for _ in range(60)]
        best = max(drawn, key=lambda values: len(_pairs(values) & uncovered))
        uncovered -= _pairs(best)
        sources = SOURCES[best["model"]]
        if best["devices"] == 500:
            sources = tuple(source for source in sources if source != "digits")
        found.append(Cell(number, **best, source=sources[int(rng.integers(len(sources)))]))
    assert not uncovered, f"pairs without a cell: {sorted(map(str, uncovered))}"
    return found


def _drawn(rng: np.random.Generator) -> dict[str, Any]:
    while True:
        values = {name: of[int(rng.integers(len(of)))] for name, of in FACTORS.items()}
        if rng.random() < MLP_SHARE:  # convolutions cost most of the time
            values["model"] = "mlp"
        if _possible(values):
            return values


def _possible(values: Mapping[str, Any]) -> bool:
    """One class per device needs as many devices as classes; and no class is left to be late."""
    few = values.get("partition") == "one-class" and values.get("devices") == 3
    return not few


def _pairs(values: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, values[a], b, values[b]) for a, b in combinations(FACTORS, 2)}


def part(name: str) -> list[Cell]:
    """The cells of a part of the matrix."""
    everything = cells()
    if name == "quick":
        own = [c for c in everything if c.source == "digits" and c.number % 3]
        return sorted(own, key=lambda c: c.updates * c.epochs)[:QUICK]
    return [c for c in everything if (c.number % 3 == 0) == (name == "tune")]


def write_subsets(folder: Path, wanted: Iterable[Cell]) -> None:
    """Random subsets of the datasets that the cells use, as npz files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for cell in wanted:
        path = folder / cell.subset
        if path.exists():
            continue
        if cell.source == "digits":
            x, y = load_digits(return_X_y=True)
            whole = {"x": x.astype(np.float32), "y": y.astype(np.int64)}
        else:
            whole = np.load(DATA / f"{cell.source}.npz")
        rows = ROWS[cell.devices]
        chosen = np.random.default_rng(0).permutation(len(whole["y"]))[: rows + TEST_ROWS]
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".npz", delete=False) as file:
            x = THINNED.get(cell.model, lambda x: x)(whole["x"][chosen])
            np.savez(file, x=x, y=whole["y"][chosen], test=np.arange(len(chosen)) >= rows)
        Path(file.name).rename(path)


def measured(job: tuple[Cell, str, int, Path]) -> dict[str, Any]:
    """Run one method in one cell; returns the line of the results."""
    import latecomer
    from latecomer.study.config import parse
    from latecomer.study.experiment import Experiment

    cell, method, seed, data = job
    torch.set_num_threads(1)
    line: dict[str, Any] = {"cell": cell.number, "method": method, "seed": seed}
    try:
        tree = cell.tree("fedbuff", seed, data)
        seconds = Experiment(parse(tree)).resolution.task_seconds
        duration = cell.updates / math.fsum(1 / each for each in seconds)
        tree = cell.tree(method, seed, data) | {"stop": {"virtual_seconds": duration}}
        if cell.trouble == "busy-server":
            tree["server"] = {"merge_seconds": SERVER_LOAD * duration / cell.updates}
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            result = latecomer.run(tree, Path(folder) / "run")
            metrics, summary = result.metrics, result.summary
        line["cpu"] = round(time.process_time() - begun, 2)
        column = "client_accuracy" if cell.trouble == "label-shift" else "accuracy"
        line |= scores(metrics, column, duration)
        if cell.trouble in ("late", "away"):
            line["late"] = scores(metrics, "accuracy_affected", duration)["accuracy"]
        line |= {"updates": summary["updates"], "versions": summary["versions"]}
    except latecomer.RunFailed as error:  # a model that is no longer finite
        line |= {"accuracy": 0.0, "drop": 1.0, "cpu": 0.0, "error": str(error)}
    return line


def scores(metrics: pd.DataFrame, column: str, duration: float) -> dict[str, float]:
    """Mean in the last quarter of the time; largest fall below the best so far in the second half.

    Between two evaluations the earlier one counts.
    """
    times, values = metrics["virtual_seconds"].to_numpy(), metrics[column].to_numpy()
    grid = np.linspace(0, duration, 201)
    along = values[np.maximum(0, np.searchsorted(times, grid, side="right") - 1)]
    late = grid >= SECOND_HALF * duration
    drop = (np.maximum.accumulate(along) - along)[late].max()
    return {
        "accuracy": round(float(along[grid >= LAST * duration].mean()), 4),
        "drop": round(float(drop), 4),
    }


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(args: argparse.Namespace) -> None:
    out, wanted = Path(args.out), part(args.part)
    if args.cells:
        wanted = [cell for cell in wanted if cell.number in args.cells]
    write_subsets(out / "data", wanted)
    path = out / "results.jsonl"
    known = {(line["cell"], line["method"], line["seed"]) for line in read(path)}
    jobs = [
        (cell, method, seed, out / "data")
        for seed in args.seeds
        for cell in wanted
        for method in args.methods
        if (cell.number, method, seed) not in known
    ]
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, path.open("a") as file:
        for done, line in enumerate(pool.imap_unordered(measured, jobs), 1):
            print(json.dumps(line), file=file, flush=True)
            if done % 50 == 0 or done == len(jobs):
                print(f"{done} of {len(jobs)} runs, {time.monotonic() - begun:.0f} s", flush=True)


def results_of(args: argparse.Namespace) -> pd.DataFrame:
    """The results of the part in DIR/results.jsonl, one row per run."""
    numbers = [cell.number for cell in part(args.part)]
    lines = pd.DataFrame(read(Path(args.out) / "results.jsonl"))
    wanted = lines.cell.isin(numbers) & lines.method.isin(args.methods)
    return lines[wanted & lines.seed.isin(args.seeds)].sort_values(["cell", "method", "seed"])


def tables(lines: pd.DataFrame, worst: int = 15) -> str:
    """How far every method is behind the best of all, and the cells in which `OURS` is furthest.

    Only cells in which all methods have run with all seeds count.
    """
    runs = lines.groupby(["cell", "method"]).seed.nunique().unstack()
    whole = runs[(runs == lines.seed.nunique()).all(axis=1)].index
    lines = lines[lines.cell.isin(whole)]
    mean = lines.groupby(["cell", "method"])[["accuracy", "drop", "cpu"]].mean().unstack()
    accuracy, drop, cpu = mean["accuracy"], mean["drop"], mean["cpu"]
    best = accuracy.max(axis=1)
    gaps = accuracy.rsub(best, axis=0)
    learnt = best > 0.5
    heads = (
        "method", "mean gap", "worst gap", "worst gap (best > 0.5)", "gap at most 0.05",
        "gap above 0.1 (best > 0.5)", "mean rank", "mean drop", "drop above 0.1", "CPU",
    )  # fmt: skip
    rows = [
        f"{len(mean)} cells ({learnt.sum()} in which the best accuracy exceeds 0.5),"
        f" {lines.seed.nunique()} seeds",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    ranks = accuracy.rank(axis=1, ascending=False)
    others = accuracy.drop(columns=OURS, errors="ignore").idxmax(axis=1)
    calm = pd.Series({cell: drop.loc[cell, name] <= 0.1 for cell, name in others.items()})
    for name in sorted(accuracy.columns, key=lambda m: gaps[m].mean()):
        gap = gaps[name]
        ratio = (cpu[name] / cpu["fedbuff"]).median() if "fedbuff" in cpu else math.nan
        rows.append(
            f"| `{name}` | {gap.mean():.3f} | {gap.max():.3f} | {gap[learnt].max():.3f} |"
            f" {(gap <= 0.05).mean():.0%} | {(gap[learnt] > 0.1).sum()} |"
            f" {ranks[name].mean():.2f} | {drop[name].mean():.3f} |"
            f" {(drop[name][calm] > 0.1).mean():.0%} | {ratio:.2f} |"
        )
    if OURS in gaps:
        names = {cell.number: cell.name for cell in cells()}
        rows += ["", f"The cells in which `{OURS}` is furthest behind:", ""]
        for number in gaps[OURS].sort_values(ascending=False).index[:worst]:
            row = accuracy.loc[number]
            rows.append(
                f"- {names[number]}: {row[OURS]:.3f}, best `{row.idxmax()}` {row.max():.3f},"
                f" drop {drop.loc[number, OURS]:.2f}"
            )
    return "\n".join(rows)


def write_page(args: argparse.Namespace) -> None:
    """Write the results to `RESULTS`, and their tables into `PAGE` between its two comments."""
    results_of(args)[COLUMNS].to_csv(RESULTS, index=False)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n\n{tables(pd.read_csv(RESULTS))}\n\n{END}{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("run", "table", "page", "cells"))
    parser.add_argument("--part", default="report", choices=("report", "tune", "quick"))
    parser.add_argument("--seeds", default="1,2,3", type=lambda t: [int(s) for s in t.split(",")])
    parser.add_argument("--cells", default=[], type=lambda t: [int(s) for s in t.split(",")])
    parser.add_argument("--methods", default=list(METHODS), type=lambda t: t.split(";"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", default="stress")
    parser.add_argument("--worst", type=int, default=15)
    args = parser.parse_args()
    if args.what == "run":
        run(args)
    elif args.what == "table":
        print(tables(results_of(args), args.worst))
    elif args.what == "page":
        write_page(args)
    else:
        for cell in part(args.part):
            print(cell.name, f"({cell.updates} updates)", asdict(cell) if args.worst < 0 else "")


if __name__ == "__main__":
    main()

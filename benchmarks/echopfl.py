"""The studies of docs/studies/echopfl.md: personalised clusters, and when a broadcast pays.

python benchmarks/echopfl.py NAME [NAME ...] [--seeds 1,2,3] [--jobs 2] [--out DIR] [--charts DIR]

planted: devices of 2, 3 and 4 groups (labels permuted, or other classes), mixed speeds; are they
found? drift: two fifths of the devices change their labelling in mid-run. two-classes: every device
has two classes of digits, all methods; worlds: three groups of permuted labels, all methods.
broadcasts: the two classes under every broadcast policy, and without clusters.
mnist and sp-sw-har: all methods on ../shared/data. Finished runs are kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from charts import line_chart
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score
from studies import Runs, arguments, curves, method, table

import latecomer
from latecomer.study.compare import resume_comparison

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
DEVICES, EXAMPLES_EACH = 40, 40

METHODS = {
    "echopfl": method("echopfl"),
    "echopfl, no broadcast": method("echopfl", broadcast="never"),
    "fedasync": method("fedasync"),
    "fedavg": method("fedavg"),
    "clusterfl": method("clusterfl"),
    "ifca": method("ifca", clusters=4),
    "oort": method("oort"),
    "fedsea": method("fedsea"),
    "standalone": method("standalone"),
}
RULES = {
    "never": method("echopfl", broadcast="never"),
    "predictor": method("echopfl"),
    "oracle (Eq. 4)": method("echopfl", broadcast="oracle"),
    "every 5 merges": method("echopfl", broadcast="every-n"),
    "always": method("echopfl", broadcast="always"),
    "no clusters, never": method("echopfl", clusters=1, max_ratio=1.0, broadcast="never"),
    "no clusters, predictor": method("echopfl", clusters=1, max_ratio=1.0),
}


@dataclass(frozen=True)
class Population:
    """A dataset by device; `world` is the group of each device."""

    path: Path
    world: list[int]


def digits_of(devices: Sequence[np.ndarray], relabel: Sequence[np.ndarray], path: Path) -> None:
    """Write the digits with these indices, labels changed as `relabel` says, device by device."""
    bunch = load_digits()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        x=np.concatenate([bunch.images[rows, np.newaxis] / 16 for rows in devices]),
        y=np.concatenate(
            [names[bunch.target[rows]] for rows, names in zip(devices, relabel, strict=True)]
        ),
        subject=np.concatenate([np.full(len(rows), d) for d, rows in enumerate(devices)]),
    )


def planted(worlds: int, kind: str, seed: int, folder: Path) -> Population:
    """`kind`: "permuted" labels, or different "classes" in each world."""
    rng, labels = np.random.default_rng(seed), load_digits().target
    names = [rng.permutation(10) for _ in range(worlds)]
    shares = np.array_split(rng.permutation(10), worlds)
    world = rng.permutation(np.arange(DEVICES) % worlds)
    rows, relabel = [], []
    for group in world:
        pool = np.arange(len(labels))
        if kind == "classes":
            pool = np.flatnonzero(np.isin(labels, shares[group]))
        rows.append(rng.choice(pool, EXAMPLES_EACH, replace=False))
        relabel.append(names[group] if kind == "permuted" else np.arange(10))
    path = folder / f"{worlds}-{kind}-{seed}.npz"
    digits_of(rows, relabel, path)
    return Population(path, [int(group) for group in world])


def two_classes(seed: int, folder: Path) -> Population:
    """Every device has two classes, each of them of some other devices, too."""
    rng, labels = np.random.default_rng(seed), load_digits().target
    rows, world = [], []
    for device in range(DEVICES):
        pair = (device % 10, (device + 1 + (device // 10) % 2) % 10)
        pool = np.flatnonzero(np.isin(labels, pair))
        rows.append(rng.choice(pool, EXAMPLES_EACH, replace=False))
        world.append(device % 10)
    path = folder / f"two-classes-{seed}.npz"
    digits_of(rows, [np.arange(10)] * DEVICES, path)
    return Population(path, world)


def scenario(path: Path, updates: int, lr: float, **more: Any) -> dict[str, Any]:
    return {
        "data": {"source": "npz", "path": str(path), "partition": "by-subject"},
        "fleet": {"profile": "tiers"},
        "training": {"lr": lr},
        "stop": {"updates": updates},
        "evaluate": {"every": max(1, updates // 40), "clients": True},
        **more,
    }


def compared(name: str, tree: Mapping[str, Any], methods: Mapping[str, Any], args: Any) -> Runs:
    """The finished runs of all methods and seeds; an interrupted comparison is resumed."""
    folder = Path(args.out) / name
    if folder.exists() and not (folder / "compare.csv").exists():
        resume_comparison(folder, jobs=args.jobs)
    elif not folder.exists():
        whole = {**tree, "compare": dict(methods)}
        latecomer.compare(whole, list(methods), seeds=args.seeds, out=folder, jobs=args.jobs)
    return dict(latecomer.load(folder).runs)


def one_run(folder: Path, tree: Mapping[str, Any]) -> Any:
    if not (folder / "summary.json").exists():
        latecomer.run(dict(tree), out=folder)
    return latecomer.load(folder)


def lines_of(result: Any, *kinds: str) -> list[dict[str, Any]]:
    with (result.folder / "events.jsonl").open() as lines:
        found = (json.loads(line) for line in lines)
        return [event for event in found if event["event"] in kinds]


def assignments(result: Any) -> list[str]:
    """The cluster of each device at the end."""
    last = {e["device"]: e["lineage"] for e in lines_of(result, "arrival") if "lineage" in e}
    return [last[device] for device in sorted(last)]


def peak(result: Any, seconds: float = 1.0) -> float:
    """The largest number of megabytes over the server's links within a second."""
    moved: dict[int, int] = {}
    for event in lines_of(result, "dispatch", "arrival", "broadcast"):
        second = int(event["time"] / seconds)
        moved[second] = moved.get(second, 0) + event.get("bytes", 0)
    return max(moved.values()) / 1e6


def study_planted(args: Any) -> None:
    columns = "adjusted Rand index | clusters | local test accuracy | worst | last change"
    print(f"| worlds | kind | {columns} |", "|---|---|---|---|---|---|---|", sep="\n")
    for kind in ("permuted", "classes"):
        for worlds in (2, 3, 4):
            rows = []
            for seed in args.seeds:
                population = planted(worlds, kind, seed, Path(args.out) / "data")
                folder = Path(args.out) / f"planted-{worlds}-{kind}-{seed}"
                tree = scenario(population.path, 4000, 0.3, seed=seed)
                result = one_run(folder, {**tree, "strategy": {"name": "echopfl"}})
                found, summary = assignments(result), result.summary
                changes = lines_of(result, "split", "merge")
                local = summary["client_accuracy"]
                rows.append(
                    (
                        adjusted_rand_score(population.world, found),
                        len(set(found)),
                        local["mean"],
                        local["worst"],
                        changes[-1]["time"] / summary["virtual_seconds"] if changes else 0.0,
                    )
                )
            rand, clusters, mean, worst, last = np.array(rows).T
            print(
                f"| {worlds} | {kind} | {rand.mean():.3f} (minimum {rand.min():.3f}) |"
                f" {', '.join(str(int(c)) for c in clusters)} | {mean.mean():.3f} |"
                f" {worst.mean():.2f} | {', '.join(f'{100 * t:.0f}%' for t in last)} |"
            )


def study_drift(args: Any) -> None:
    """One world; at half time two fifths of the devices change the meaning of their labels."""
    shift = {"kind": "shift", "share": 0.4}
    for seed in args.seeds:
        population = planted(1, "permuted", seed, Path(args.out) / "data")
        for name in ("echopfl", "fedasync"):
            tree = scenario(population.path, 4000, 0.3, seed=seed)
            tree["data"]["drift"] = shift
            tree["stop"] = {"virtual_seconds": 500.0}
            result = one_run(
                Path(args.out) / f"drift-{name}-{seed}", {**tree, "strategy": {"name": name}}
            )
            metrics, local = result.metrics, result.summary["client_accuracy"]
            half = metrics.virtual_seconds.iloc[-1] / 2
            after = metrics[metrics.virtual_seconds > half]
            before = metrics[metrics.virtual_seconds <= half].client_accuracy.iloc[-1]
            back = after[after.client_accuracy >= before - 0.02]
            took = back.virtual_seconds.iloc[0] - half if len(back) else float("nan")
            uploads = (
                sum(half < e["time"] <= half + took for e in lines_of(result, "arrival")) / DEVICES
            )
            print(
                f"seed {seed}, {name}: {before:.3f} before,"
                f" minimum {after.client_accuracy.min():.3f},"
                f" back after {uploads:.1f} uploads per device; at the end {local['mean']:.3f},"
                f" {len(set(assignments(result)))} clusters"
            )


def study_methods(
    name: str, tree: Mapping[str, Any], methods: Mapping[str, Any], args: Any
) -> None:
    runs = compared(name, tree, methods, args)
    reached = {
        seed: max(
            runs[label, seed].metrics.client_accuracy.max()
            for label in ("fedasync", "fedavg")
            if (label, seed) in runs
        )
        for seed in args.seeds
        if ("fedasync", seed) in runs
    }
    rows: dict[str, list[dict[str, float]]] = {}
    for (label, seed), result in runs.items():
        summary, metrics = result.summary, result.metrics
        best = metrics[metrics.client_accuracy >= reached.get(seed, 2.0)].virtual_seconds
        row = {
            "local test accuracy": summary["client_accuracy"]["mean"],
            "worst": summary["client_accuracy"]["worst"],
            "slow devices": slow_accuracy(result),
            "seconds": summary["virtual_seconds"],
            "to single-model best": best.iloc[0] if len(best) else float("nan"),
            "MB up": summary["bytes"]["up"] / 1e6,
            "MB down": summary["bytes"]["down"] / 1e6,
            "peak MB/s": peak(result),
            "broadcasts": (summary["clusters"] or {}).get("broadcasts", 0),
        }
        rows.setdefault(label, []).append(row)
    print(table(rows, {"local": 3, "worst": 2, "slow": 3, "seconds": 0, "to": 0, "broad": 0}))
    if args.charts:
        chart = Path(args.charts) / f"echopfl-{name}.svg"
        lines = curves(runs, "client_accuracy", "virtual_seconds")
        line_chart(chart, f"{name}: local test accuracy", "virtual seconds", "accuracy", lines)


def slow_accuracy(result: Any) -> float:
    """Local test accuracy of the slowest fifth of the devices, by how seldom they upload."""
    uploads: dict[int, int] = {}
    for event in lines_of(result, "arrival"):
        uploads[event["device"]] = uploads.get(event["device"], 0) + 1
    slowest = sorted(uploads, key=uploads.__getitem__)[: max(1, len(uploads) // 5)]
    devices = pd.read_csv(result.folder / "devices.csv").set_index("device").accuracy
    return float(devices[slowest].mean())


def main() -> None:
    names = ("planted", "drift", "two-classes", "worlds", "broadcasts", "mnist", "sp-sw-har")
    args = arguments(__doc__, names, "runs/echopfl").parse_args()
    for name in args.names:
        print(f"\n## {name}\n", flush=True)
        if name == "planted":
            study_planted(args)
        elif name == "drift":
            study_drift(args)
        elif name == "worlds":
            population = planted(3, "permuted", 1, Path(args.out) / "data")
            study_methods(name, scenario(population.path, 4000, 0.3), METHODS, args)
        elif name in ("two-classes", "broadcasts"):
            population = two_classes(1, Path(args.out) / "data")
            methods = METHODS if name == "two-classes" else RULES
            study_methods(name, scenario(population.path, 4000, 0.2), methods, args)
        else:
            study_methods(name, on_file(name), METHODS, args)


def on_file(name: str) -> dict[str, Any]:
    """Real data: MNIST with few classes each, or people with phones and watches."""
    if name == "sp-sw-har":
        return scenario(DATA / "sp_sw_har.npz", 1500, 0.05, model={"name": "cnn1d"})
    tree = scenario(DATA / "mnist.npz", 1500, 0.05, model={"name": "lenet"})
    tree["data"] |= {"source": "mnist", "partition": "dirichlet", "alpha": 0.05, "per_device": 60}
    tree["fleet"] |= {"devices": DEVICES}
    return tree


if __name__ == "__main__":
    main()

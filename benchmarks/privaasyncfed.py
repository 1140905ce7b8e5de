"""The studies of docs/studies/privaasyncfed.md: sub-models, noise, and what both cost.

python benchmarks/privaasyncfed.py NAME [NAME ...] [--seeds 1,2,3] [--jobs 2] [--out DIR]
                                   [--charts DIR]

Each NAME runs the same data, fleet and seeds under several methods and prints a table (mean and
standard deviation over seeds). Finished runs are not repeated: an interrupted study is resumed.
"accuracy" is that of the whole model on the test set, over the last tenth of the aggregations;
"local test accuracy" that of the model each device has, on its held-back data; epsilon is the
privacy loss by the devices' ledgers. "printed" is the noise of the paper's Delta f,
"true" that of a step's real sensitivity. Studies named mnist* need ../shared/data. The names
"ledger" and "sizes" need no runs: the composed epsilon, and the sizes of sub-models.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from charts import Line, line_chart
from studies import Runs, Study, arguments, by_method, curves, method, spread, table

DELTA = 1e-5
DIGITS, MNIST = "privaasyncfed/digits.toml", "privaasyncfed/mnist.toml"
PRIVA, FULL = "privaasyncfed", "dp-fedasync"


def privacy(**changes: Any) -> dict[str, Any]:
    return {"privacy": changes}


LEVELS: dict[str, dict[str, Any]] = {
    "none": privacy(epsilon=0.0),
    "10 printed": privacy(epsilon=10.0, denominator="dataset"),
    "5 printed": privacy(epsilon=5.0, denominator="dataset"),
    "1 printed": privacy(epsilon=1.0, denominator="dataset"),
    "10 true": privacy(epsilon=10.0, denominator="batch"),
    "5 true": privacy(epsilon=5.0, denominator="batch"),
    "1 true": privacy(epsilon=1.0, denominator="batch"),
}


def tuned(name: str, lr: float, weight: float, decay: str) -> dict[str, Any]:
    """A method with this weight of an update of staleness 0; decay "paper" is that of its paper."""
    flat: dict[str, Any] = {"a": 0.0} if name == PRIVA else {"decay": "constant"}
    options = {"beta" if name == PRIVA else "alpha": weight, **(flat if decay == "flat" else {})}
    return {**method(name, **options), "training": {"lr": lr}}


# The same for both methods; docs/studies/privaasyncfed.md has the results.
GRID = {
    f"{name}, lr {lr}, weight {weight}, {decay}": tuned(name, lr, weight, decay)
    for name in (PRIVA, FULL)
    for lr in (0.1, 0.3, 1.0)
    for weight in (0.2, 0.6)
    for decay in ("paper", "flat")
} | {f"{name}, lr 0.01 (the paper's)": tuned(name, 0.01, 0.6, "paper") for name in (PRIVA, FULL)}


MNIST_GRID = {
    f"{level}: {name}, lr {lr}, weight {weight}, {decay}": {
        **tuned(name, lr, weight, decay),
        **LEVELS[level],
    }
    for level, rates in {
        "5 printed": (0.3, 1.0),
        "1 printed": (0.1, 0.3),
    }.items()
    for name in (PRIVA, FULL)
    for lr in rates
    for weight, decay in ((0.6, "paper"), (0.2, "flat"))
}


def dotted(changes: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": v for name, section in changes.items() for key, v in section.items()}


# What the searches found best, as (lr, weight, decay). What was not searched ("1 true" on digits,
# half the levels on MNIST) takes that of the nearest noise.
Setting = tuple[float, float, str]
BEST: dict[str, dict[str, Setting]] = {
    PRIVA: {
        "none": (0.3, 0.6, "paper"),
        "10 printed": (1.0, 0.6, "paper"),
        "5 printed": (1.0, 0.2, "paper"),
        "1 printed": (0.1, 0.6, "paper"),
        "10 true": (0.3, 0.2, "paper"),
        "5 true": (0.1, 0.6, "paper"),
        "1 true": (0.1, 0.6, "paper"),
    },
    FULL: {
        "none": (0.3, 0.6, "paper"),
        "10 printed": (1.0, 0.6, "paper"),
        "5 printed": (1.0, 0.6, "paper"),
        "1 printed": (0.3, 0.2, "flat"),
        "10 true": (0.3, 0.6, "paper"),
        "5 true": (0.1, 0.6, "paper"),
        "1 true": (0.1, 0.6, "paper"),
    },
}
ON_MNIST: dict[str, Setting] = {  # the same for both methods
    "none": (0.3, 0.6, "paper"),
    "10 printed": (1.0, 0.6, "paper"),
    "5 printed": (1.0, 0.6, "paper"),
    "1 printed": (0.3, 0.6, "paper"),
    "10 true": (0.3, 0.6, "paper"),
    "5 true": (0.3, 0.2, "flat"),
    "1 true": (0.1, 0.2, "flat"),
}


def at_best(settings: Mapping[str, Mapping[str, Setting]]) -> dict[str, dict[str, Any]]:
    return {
        f"{name} @ {level}": {**tuned(name, *settings[name][level]), **changes}
        for name in (PRIVA, FULL)
        for level, changes in LEVELS.items()
    }


HETEROFL = {"heterofl @ none": {**method("heterofl"), **LEVELS["none"]}}
AS_IT_COMES = {
    f"{name} @ {level}": {**method(name), **changes}
    for name in (PRIVA, FULL)
    for level, changes in LEVELS.items()
}
WHOLE = {"submodels": {"level": "none"}}
WIDTHS = {
    "sub-models": method(PRIVA),
    "sub-models, measured": {**method(PRIVA), "submodels": {"level": "measured"}},
    "whole models": {**method(PRIVA), **WHOLE},
    "all at 0.25": {**method(PRIVA), "submodels": {"widths": [0.25], "shares": [1.0]}},
    "heterofl": method("heterofl"),
    "heterofl, whole models": {**method("heterofl"), **WHOLE},
}


def budget(name: str, lr: float, clip: float, total: float = 10.0, **more: Any) -> dict[str, Any]:
    """So much in all, for as many tasks as a fast device does in a run."""
    noise = {"epsilon": total, "clip": clip, "mode": "whole-run", "tasks": 75, **more}
    return {**method(name), "training": {"lr": lr}, **privacy(**noise)}


def with_more(changes: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**changes, **{key: {**changes.get(key, {}), **new} for key, new in sections.items()}}


SMALL = {"name": "mlp", "hidden": [32]}
ALL = {"batch_size": 10**6}
BUDGETS = {
    f"{name} @ {label}": changes
    for name in (PRIVA, FULL)
    for label, changes in {
        "10, shuffled": budget(name, 0.1, 2.0),
        "10, full batches": with_more(budget(name, 3.0, 1.0), training=ALL),
        "10, update": budget(name, 0.3, 0.3, where="update"),
        "10, poisson": budget(name, 0.1, 2.0, sampling="poisson"),
        "10, poisson, 40 tasks": budget(name, 0.1, 2.0, sampling="poisson", tasks=40),
        "none, small": {**tuned(name, 0.3, 0.6, "paper"), **LEVELS["none"], "model": SMALL},
        "10, poisson, small": {**budget(name, 0.3, 1.0, sampling="poisson"), "model": SMALL},
        "1, poisson, small": {**budget(name, 0.1, 1.0, 1.0, sampling="poisson"), "model": SMALL},
    }.items()
}
MNIST_BUDGETS = {
    f"{name} @ {total:g}, poisson": budget(name, 0.2, 0.5, total, sampling="poisson")
    for name in (PRIVA, FULL)
    for total in (10.0, 1.0)
}
MNIST_ALL = {
    "none, lr 0.01 (the paper's)": {**tuned(PRIVA, 0.01, 0.6, "paper"), **LEVELS["none"]},
    "1 printed, lr 0.01 (the paper's)": {**tuned(PRIVA, 0.01, 0.6, "paper"), **LEVELS["1 printed"]},
    "1 printed, lr 0.1": {**tuned(PRIVA, 0.1, 0.6, "paper"), **LEVELS["1 printed"]},
    "10 in all, poisson": budget(PRIVA, 0.2, 0.5, sampling="poisson"),
}

STUDIES: dict[str, Study] = {
    "digits-search": Study(
        DIGITS,
        GRID,
        points={level: dotted(changes) for level, changes in LEVELS.items() if level != "1 true"},
    ),
    "digits": Study(DIGITS, AS_IT_COMES | HETEROFL),
    "digits-best": Study(DIGITS, at_best(BEST)),
    "mnist-search": Study(MNIST, MNIST_GRID),
    "mnist": Study(MNIST, at_best({PRIVA: ON_MNIST, FULL: ON_MNIST}) | HETEROFL),
    "mnist-all": Study(MNIST, MNIST_ALL, points={"": {"data.per_device": 0}}),
    "digits-budget": Study(DIGITS, BUDGETS),
    "mnist-budget": Study(MNIST, MNIST_BUDGETS),
    "digits-widths": Study(DIGITS, WIDTHS, points={"": dotted(LEVELS["none"])}),
}


def measures(result: Any) -> dict[str, float]:
    """The columns of one run."""
    metrics, summary = result.metrics, result.summary
    end = metrics[metrics["updates"] > 0.9 * metrics["updates"].iloc[-1]]
    spent = summary["epsilon"] or {}
    return {
        "accuracy": end["accuracy"].mean(),
        "local test accuracy": summary["client_accuracy"]["mean"],
        "worst device": summary["client_accuracy"]["worst"],
        "epsilon, mean": spent.get("mean", np.nan),
        "epsilon, max": spent.get("max", np.nan),
        "updates": summary["updates"],
        "virtual s": summary["virtual_seconds"],
        "MB up": summary["bytes"]["up"] / 1e6,
        "MB down": summary["bytes"]["down"] / 1e6,
    }


DECIMALS = {"accuracy": 3, "local": 3, "worst": 3, "updates": 0, "virtual s": 0, "width": 3}


def experiment_of(result: Any) -> Any:
    from latecomer.study.config import load_config
    from latecomer.study.experiment import Experiment

    return Experiment(load_config(result.folder / "config.toml"))


def by_width(result: Any) -> dict[str, float]:
    """The accuracy of the final model's corners on the test set."""
    import torch
    from safetensors.torch import load_file

    from latecomer.core.submodel import take

    experiment = experiment_of(result)
    networks, test = experiment.networks, experiment.federation.test
    params = networks.whole.layout.flatten(load_file(result.folder / "model.safetensors"))
    found = {f"width {width:g}": np.nan for width in (1.0, 0.75, 0.5, 0.25)}
    with torch.no_grad():
        for width, submodel in networks.submodels.items():
            logits = networks(submodel).logits(take(params, submodel), test.x)
            right = (logits.argmax(1) == test.y).float().mean().item()
            found[f"width {width:g}"] = right
    return found


def effort(result: Any) -> dict[str, float]:
    """The work of all devices, and the share of the slow ones."""
    experiment, events = experiment_of(result), result.events
    networks, devices = experiment.networks, experiment.fleet.devices
    works = {4 * networks(s).layout.size: networks.work(s) for s in networks.submodels.values()}
    arrivals = events[events["event"] == "arrival"]
    slow = arrivals[[devices[int(device)].group == "slow" for device in arrivals["device"]]]
    return {
        "accuracy": measures(result)["accuracy"],
        "virtual s": result.summary["virtual_seconds"],
        "MB up": result.summary["bytes"]["up"] / 1e6,
        "MB down": result.summary["bytes"]["down"] / 1e6,
        "tasks' work": arrivals["bytes"].map(works).sum(),
        "slow: updates": len(slow),
        "slow: MB up": slow["bytes"].sum() / 1e6,
        "slow: tasks' work": slow["bytes"].map(works).sum(),
    }


def table_by_level(some: Mapping[str, list[Any]]) -> str:
    """Methods beside each other, a line per level of noise.

    "in equal time" is the accuracy at the virtual time at which the first of all runs ends.
    """
    names, levels = (dict.fromkeys(x.split(" @ ")[part] for x in some) for part in (0, 1))
    end = min(r.metrics["virtual_seconds"].iloc[-1] for runs in some.values() for r in runs)
    heads = ("accuracy", "in equal time", "local test accuracy", "epsilon: mean, maximum")
    columns = [f"{name}: {head}" for name in names for head in heads]
    lines = [f"| noise | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for level in levels:
        cells = []
        for name in names:
            runs = some.get(f"{name} @ {level}", [])
            found = [measures(run) for run in runs]
            cells.append(spread((run["accuracy"] for run in found), 3))
            cells.append(spread((accuracy_before(run, end) for run in runs), 3))
            cells.append(spread((run["local test accuracy"] for run in found), 3))
            spent = [np.mean([run[f"epsilon, {k}"] for run in found]) for k in ("mean", "max")]
            cells.append("-" if np.isnan(spent[0]) else f"{spent[0]:,.1f}, {spent[1]:,.1f}")
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_before(result: Any, end: float) -> float:
    """Over the last tenth of the virtual time up to `end`."""
    when = result.metrics["virtual_seconds"]
    return float(result.metrics["accuracy"][(when > 0.9 * end) & (when <= end)].mean())


def ledger_report(charts: str) -> None:
    """What nominal epsilons add up to, by our ledger."""
    from latecomer.core.messages import TrainSpec
    from latecomer.device.ledger import Ledger, Release
    from latecomer.device.privacy import Privacy, per_release_multiplier

    def release(epsilon: float, n: int, batch: int, denominator: Any) -> Release:
        multiplier = per_release_multiplier(epsilon, DELTA)
        spec = TrainSpec(batch_size=batch, local_epochs=1)
        return Privacy("gaussian", multiplier, 2.0, DELTA, denominator=denominator).release(n, spec)

    def spent(one: Release, count: int, accountant: Any = "pld") -> float:
        return Ledger([(one, count)]).epsilon(DELTA, accountant) if count else 0.0

    counts = (1, 10, 40, 100, 200)
    print("\n### Releases of nominal epsilon, with the noise that they need\n")
    print(f"| nominal | multiplier | accountant | {' | '.join(f'after {c}' for c in counts)} |")
    print("|---" * (len(counts) + 3) + "|")
    for epsilon in (1.0, 5.0, 10.0):
        for accountant in ("pld", "rdp"):
            one = release(epsilon, 64, 64, "batch")
            cells = " | ".join(f"{spent(one, c, accountant):.3g}" for c in counts)
            print(f"| {epsilon:g} | {one.multiplier:.4g} | {accountant.upper()} | {cells} |")
    print("\n### The same with the paper's Delta f, by PLD\n")
    print(f"| nominal | examples | batch | {' | '.join(f'after {c}' for c in counts)} |")
    print("|---" * (len(counts) + 3) + "|")
    cases = ((112, 112), (112, 16), (512, 64), (3840, 64), (6000, 64))
    for epsilon in (1.0, 5.0, 10.0):
        for n, batch in cases:
            one = release(epsilon, n, batch, "dataset")
            cells = " | ".join(f"{spent(one, c):,.3g}" for c in counts)
            print(f"| {epsilon:g} | {n:,} | {batch} | {cells} |")
    totals_report()
    if charts:
        lines: dict[str, Line] = {}
        for label, one in {
            "1 true": release(1.0, 64, 64, "batch"),
            "5 true": release(5.0, 64, 64, "batch"),
            "10 true": release(10.0, 64, 64, "batch"),
            "1 printed, 16 of 112": release(1.0, 112, 16, "dataset"),
            "1 printed, 64 of 512": release(1.0, 512, 64, "dataset"),
            "1 printed, 64 of 3,840": release(1.0, 3840, 64, "dataset"),
        }.items():
            lines[label] = [(float(c), *[spent(one, c)] * 3) for c in range(1, 201)]
        path = Path(charts) / "privaasyncfed-epsilon.svg"
        title = "Epsilon truly spent, by the nominal epsilon of a release"
        ticks = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
        line_chart(path, title, "releases of a device", "epsilon", lines, ticks, True)


def totals_report() -> None:
    """The noise that a total budget asks for, by how a device trains."""
    from latecomer.core.messages import TrainSpec
    from latecomer.study.config import PrivacyConfig
    from latecomer.study.private import privacy_of

    heads = ("examples", "batch", "sampling", "where", "total", "releases", "multiplier", "noise")
    print(f"\n### The noise of a total over 40 tasks\n\n| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    ways = ((16, "shuffle", "step"), (1, "shuffle", "step"), (16, "poisson", "step"))
    for n in (112, 3840):
        for share, sampling, where in (*ways, (1, "shuffle", "update")):
            for total in (10.0, 1.0):
                batch = n if share == 1 else (16 if n == 112 else 64)
                settings = PrivacyConfig(
                    epsilon=total, mode="whole-run", tasks=40, sampling=sampling, where=where
                )
                spec = TrainSpec(batch_size=batch, local_epochs=1, momentum=0.0, lr=1.0)
                made = privacy_of(settings, spec, n)
                noise = made.noise_std(n, [batch] * (n // batch), spec)
                releases = 40 * made.releases(n, spec)
                print(
                    f"| {n:,} | {batch:,} | {sampling} | {where} | {total:g} | {releases:,} |"
                    f" {made.multiplier:.3g} | {noise:.3g} |"
                )


def sizes_report(charts: str) -> None:
    """What each level of sub-models weighs, and what a task takes the devices that carry it."""
    from latecomer.fleet.fleet import task_seconds
    from latecomer.study.config import parse
    from latecomer.study.experiment import Experiment

    for config in (DIGITS, MNIST):
        study = Study(config, {})
        experiment = Experiment(parse(study.tree()))
        networks, passes = experiment.networks, experiment.config.data.per_device
        print(f"\n### {config}\n")
        print("| devices | width | parameters | bytes each way | work | s per task | whole model |")
        print("|---" * 7 + "|")
        whole = 4 * networks.whole.layout.size
        for width, submodel in networks.submodels.items():
            profile = experiment.fleet.devices[experiment.levels.index(width)]
            model = networks(submodel)
            work, size = networks.work(submodel), 4 * model.layout.size
            (seconds,) = task_seconds([profile], [passes * work], size)
            (full,) = task_seconds([profile], [passes], whole)
            print(
                f"| {profile.group} | {width:g} | {model.layout.size:,} | {size:,} | {work:.3f} |"
                f" {seconds:.2f} | {full:.2f} |"
            )


REPORTS: dict[str, Callable[[str], None]] = {"ledger": ledger_report, "sizes": sizes_report}


def tables_of(runs: Runs) -> str:
    """The tables of a study: methods at several levels of noise, and methods without noise."""
    some = by_method(runs)
    clear = {x: runs for x, runs in some.items() if not runs[0].summary["epsilon"]}
    levelled = {x: runs for x, runs in some.items() if " @ " in x and not x.startswith("heterofl")}
    if levelled:
        tables = [table_by_level(levelled)]
    else:
        tables = [rows_of(some, measures)]
    if clear:
        tables += [rows_of(clear, of) for of in (effort, by_width)]
    return "\n\n".join(tables)


def rows_of(some: Mapping[str, list[Any]], of: Callable[[Any], dict[str, float]]) -> str:
    return table({label: [of(run) for run in runs] for label, runs in some.items()}, DECIMALS)


def draw(folder: Path, study: str, runs: Runs) -> None:
    """Accuracy over aggregations, a chart for each method that is run at several levels."""
    lines = curves(runs, "accuracy", "updates")
    for name in dict.fromkeys(label.partition(" @ ")[0] for label in lines):
        drawn = {
            x.partition(" @ ")[2]: line for x, line in lines.items() if x.startswith(f"{name} @")
        }
        if len(drawn) > 1:
            drawn |= {x: line for x, line in lines.items() if x.startswith("heterofl")}
            path = folder / f"{PRIVA}-{study}-{name.replace(', ', '-')}.svg"
            line_chart(path, f"{study}: {name}", "aggregations", "accuracy, whole model", drawn)


def main() -> None:
    args = arguments(__doc__, [*STUDIES, *REPORTS], "runs/privaasyncfed").parse_args()
    for name in args.names:
        if name in REPORTS:
            REPORTS[name](args.charts)
            continue
        study = STUDIES[name]
        for point in study.points:
            runs = study.run(name, point, args)
            heading = f"{name}{', ' + point if point else ''}"
            print(f"\n### {heading}\n\n{tables_of(runs)}", flush=True)
            if args.charts:
                draw(Path(args.charts), name, runs)


if __name__ == "__main__":
    main()

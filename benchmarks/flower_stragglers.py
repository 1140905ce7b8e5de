"""A Flower app with a slow node, in virtual time and deployed: does the one predict the other?

python benchmarks/flower_stragglers.py deployed    three runs on real nodes of this machine
python benchmarks/flower_stragglers.py virtual     the same app and strategies in virtual time
python benchmarks/flower_stragglers.py page        rewrites the table of docs/flower.md

Results go to docs/studies/flower_stragglers.json. The app is `examples/flower/torch_app` on three
nodes; in the deployment it has the two lines of docs/flower.md changed. Node i delays its replies
by 0, 10 and 20 s. In virtual time a task takes the delay of its node plus the median time of a task
of node 0 in the deployment, which has none.
"""

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import latecomer
from latecomer.deploy.local import LocalFederation

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "flower" / "torch_app"
RESULTS = ROOT / "docs" / "studies" / "flower_stragglers.json"
PAGE = ROOT / "docs" / "flower.md"
BEGIN, END = "<!-- stragglers: begin -->", "<!-- stragglers: end -->"
STRATEGIES: dict[str, dict[str, Any]] = {"fedavg": {}, "fedbuff": {"size": 3}, "fedasync": {}}
NODES, SLOWEST, SECONDS, TARGET = 3, 20.0, 170.0, 0.9
SEEDS = (1, 2, 3)


def reached(metrics: pd.DataFrame, column: str, began: float) -> float | None:
    """Seconds from `began` to the first evaluation with the target accuracy."""
    found = metrics[metrics["accuracy"] >= TARGET]
    return None if found.empty else round(float(found[column].iloc[0]) - began, 1)


def row(metrics: pd.DataFrame, column: str, began: float) -> dict[str, Any]:
    return {
        "seconds": reached(metrics, column, began),
        "accuracy": round(float(metrics["accuracy"].iloc[-1]), 3),
        "updates": int(metrics["updates"].iloc[-1]),
    }


def deployed_app(folder: Path, strategy: str) -> Path:
    """The app with two lines changed, for one strategy and a bound in seconds."""
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "digits_cnn" / "server_app.py"
    options = {**STRATEGIES[strategy], "seconds": SECONDS}
    given = "".join(f", {name}={value}" for name, value in options.items())
    text = file.read_text(encoding="utf-8")
    text = text.replace(
        "from flwr.serverapp.strategy import FedAvg", "from latecomer.flower import AsyncStrategy"
    ).replace("FedAvg(", f'AsyncStrategy("{strategy}"{given}, ')
    file.write_text(text, encoding="utf-8")
    return folder


def deployed(strategy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        app, folder = deployed_app(Path(name) / "app", strategy), Path(name) / "federation"
        with LocalFederation(app, NODES, folder, slowest=SLOWEST) as federation:
            federation.start()
            run = federation.run({"num-server-rounds": 1000, "fraction-evaluate": 0.0})
            status = federation.runs.wait(run, SECONDS + 300)
            assert status == "finished:completed", federation.runs.log()
        found = latecomer.load(folder / "run")
        events = found.events
        began = float(events[events["event"] == "dispatch"]["time"].iloc[0])
        return {**row(found.metrics, "wall_seconds", began), "task_seconds": fastest_task(events)}


def fastest_task(events: pd.DataFrame) -> float:
    """The median time of a task of the node without delay; its first task loads the app."""
    sent = events[events["event"] == "dispatch"].set_index("task")["time"]
    arrived = events[events["event"] == "arrival"].set_index("task")
    took = (arrived["time"] - sent).dropna()
    return round(min(took[arrived["device"] == d][1:].median() for d in range(NODES)), 1)


def virtual(strategy: str, seed: int, task_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        times = [task_seconds + SLOWEST * i / (NODES - 1) for i in range(NODES)]
        trace = Path(name) / "fleet.csv"
        lines = [f"{device},{seconds}" for device, seconds in enumerate(times)]
        trace.write_text("\n".join(["device,seconds_per_task", *lines]), encoding="utf-8")
        config = {
            "seed": seed,
            "fleet": {"devices": NODES, "profile": "trace", "path": str(trace)},
            "strategy": {"name": strategy, **STRATEGIES[strategy]},
            "stop": {"virtual_seconds": SECONDS},
            "evaluate": {"every": NODES},
        }
        found = latecomer.run(config, client_app=str(APP), out=Path(name) / "run")
        return row(found.metrics, "virtual_seconds", 0.0)


def table(results: dict[str, Any]) -> str:
    lines = [
        f"| strategy | virtual: s to {TARGET:g}, mean of {len(SEEDS)} seeds (range)"
        f" | deployed: s to {TARGET:g} | updates, virtual / deployed |",
        "|---|---|---|---|",
    ]
    for name in sorted(STRATEGIES, key=lambda n: results["virtual"][n]["mean"]):
        here, there = results["virtual"][name], results["deployed"][name]
        low, high = min(here["seconds"]), max(here["seconds"])
        lines.append(
            f"| `{name}` | {here['mean']:.0f} ({low:.0f} to {high:.0f}) | {there['seconds']:.0f}"
            f" | {here['updates']} / {there['updates']} |"
        )
    return "\n".join(lines)


def page(text: str, results: dict[str, Any]) -> str:
    """The page with a new table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


def main(what: str) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if what == "deployed":
        results[what] = {name: deployed(name) for name in STRATEGIES}
        results["task_seconds"] = min(each["task_seconds"] for each in results[what].values())
    elif what == "virtual":
        results[what] = {}
        for name in STRATEGIES:
            rows = [virtual(name, seed, results["task_seconds"]) for seed in SEEDS]
            seconds = [each["seconds"] or SECONDS for each in rows]
            updates, mean = rows[0]["updates"], statistics.fmean(seconds)
            results[what][name] = {"seconds": seconds, "mean": mean, "updates": updates}
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
        return
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results[what], indent=2))


if __name__ == "__main__":
    main(sys.argv[1])

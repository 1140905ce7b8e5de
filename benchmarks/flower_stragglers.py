"""A Flower app with a slow node, in virtual time and deployed: does the one predict the other?

python benchmarks/flower_stragglers.py deployed NAME   three runs on real nodes of this machine
python benchmarks/flower_stragglers.py virtual NAME    the same in virtual time, three seeds each
python benchmarks/flower_stragglers.py page            rewrites the table of docs/flower.md

NAME is one of `SCENARIOS`. Results go to docs/studies/flower_stragglers.json. The app is
`examples/flower/torch_app` on three nodes; in the deployment it has the two lines of docs/flower.md
changed. In virtual time a task takes the delay of its node plus the median time of a task of the
fastest node in the deployment, which has no delay.
"""

import json
import shutil
import statistics
import sys
import tempfile
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd

import latecomer
from latecomer.deploy.local import LocalFederation
from latecomer.deploy.node import Node

ROOT = Path(__file__).parents[1]
APP = ROOT / "examples" / "flower" / "torch_app"
RESULTS = ROOT / "docs" / "studies" / "flower_stragglers.json"
PAGE = ROOT / "docs" / "flower.md"
BEGIN, END = "<!-- stragglers: begin -->", "<!-- stragglers: end -->"
STRATEGIES: dict[str, dict[str, Any]] = {"fedavg": {}, "fedbuff": {"size": 3}, "fedasync": {}}
NODES, TARGET = 3, 0.9
# Delays of the nodes' replies and length of a run, in seconds.
SCENARIOS = {"even": ((0, 10, 20), 170), "one": ((0, 0, 80), 200)}
SEEDS = (1, 2, 3)


class DelayedFederation(LocalFederation):
    """A federation in which node i delays its replies to tasks by delays[i] seconds."""

    def __init__(self, app: Path, folder: Path, delays: tuple[int, ...]) -> None:
        super().__init__(app, len(delays), folder)
        self.delays = delays

    def _node(self, number: int) -> Node:
        self.node_config["delay"] = float(self.delays[number])
        return super()._node(number)


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


def deployed_app(folder: Path, strategy: str, seconds: float) -> Path:
    """The app with two lines changed, for one strategy and a bound in seconds."""
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "digits_cnn" / "server_app.py"
    options = {**STRATEGIES[strategy], "seconds": seconds}
    given = "".join(f", {name}={value}" for name, value in options.items())
    text = file.read_text(encoding="utf-8")
    text = text.replace(
        "from flwr.serverapp.strategy import FedAvg", "from latecomer.flower import AsyncStrategy"
    ).replace("FedAvg(", f'AsyncStrategy("{strategy}"{given}, ')
    file.write_text(text, encoding="utf-8")
    return folder


def deployed(strategy: str, scenario: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        (delays, seconds), folder = SCENARIOS[scenario], Path(name) / "federation"
        app = deployed_app(Path(name) / "app", strategy, seconds)
        with DelayedFederation(app, folder, delays) as federation:
            federation.start()
            run = federation.run({"num-server-rounds": 1000, "fraction-evaluate": 0.0})
            status = federation.runs.wait(run, seconds + 300)
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


def virtual(strategy: str, scenario: str, seed: int, task_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        delays, length = SCENARIOS[scenario]
        times = [task_seconds + delay for delay in delays]
        trace = Path(name) / "fleet.csv"
        lines = [f"{device},{seconds}" for device, seconds in enumerate(times)]
        trace.write_text("\n".join(["device,seconds_per_task", *lines]), encoding="utf-8")
        config = {
            "seed": seed,
            "fleet": {"devices": NODES, "profile": "trace", "path": str(trace)},
            "strategy": {"name": strategy, **STRATEGIES[strategy]},
            "stop": {"virtual_seconds": float(length)},
            "evaluate": {"every": NODES},
        }
        found = latecomer.run(config, client_app=str(APP), out=Path(name) / "run")
        return row(found.metrics, "virtual_seconds", 0.0)


def fastest(results: dict[str, Any]) -> float:
    """Seconds of a task without delay in the deployed runs."""
    rows = [each for some in results["deployed"].values() for each in some]
    return min(each["task_seconds"] for each in rows)


def shown(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.0f}"


def order(results: dict[str, Any], where: str) -> list[str]:
    """The strategies by the median time to the target, then by their last accuracy."""

    def rank(name: str) -> tuple[float, float]:
        rows = results[where][name]
        seconds = [inf if each["seconds"] is None else each["seconds"] for each in rows]
        return statistics.median(seconds), -statistics.median(each["accuracy"] for each in rows)

    return sorted(results[where], key=rank)


def table(all_results: dict[str, Any]) -> str:
    lines = [
        f"| s per task | strategy | virtual: s to {TARGET:g}, three seeds | accuracy at the end"
        f" | deployed: s to {TARGET:g} | accuracy at the end | updates, virtual / deployed |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario, results in all_results.items():
        task = fastest(results)
        delays = ", ".join(f"{task + delay:.0f}" for delay in SCENARIOS[scenario][0])
        for name in order(results, "virtual"):
            here, (there,) = results["virtual"][name], results["deployed"][name]
            seconds = ", ".join(shown(each["seconds"]) for each in here)
            accuracy = ", ".join(f"{each['accuracy']:.2f}" for each in here)
            lines.append(
                f"| {delays} | `{name}` | {seconds} | {accuracy} | {shown(there['seconds'])}"
                f" | {there['accuracy']:.2f} | {here[0]['updates']} / {there['updates']} |"
            )
    return "\n".join(lines)


def page(text: str, results: dict[str, Any]) -> str:
    """The page with a new table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}"


def main(what: str, scenario: str = "even") -> None:
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    results = stored.setdefault(scenario, {})
    if what == "deployed":
        results[what] = {name: [deployed(name, scenario)] for name in STRATEGIES}
    elif what == "virtual":
        task = fastest(results)
        results[what] = {
            name: [virtual(name, scenario, seed, task) for seed in SEEDS] for name in STRATEGIES
        }
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")
        return
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

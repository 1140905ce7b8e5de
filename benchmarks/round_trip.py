"""How long a task is under way: a warm node against a stock one, on loopback.

    python benchmarks/round_trip.py [--megabytes 1] [--tasks 12] [--tls]

A federation of one device; the server sends it a model of that size, the device sends back as many
numbers and hardly trains. Each line is the median over the tasks after the first two, from sending
a task to having its update, with the quickest and the slowest.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from latecomer.deploy.local import LocalFederation

PYPROJECT = """
[project]
name = "round-trip"
version = "0.1.0"
[tool.flwr.app]
publisher = "latecomer"
[tool.flwr.app.components]
serverapp = "round_trip.server_app:app"
clientapp = "round_trip.client_app:app"
[tool.flwr.app.config]
folder = "run"
updates = 10
"""

TASK = """
from torch import arange, randn
from latecomer.device.flat import flat_model

INPUTS, CLASSES = {inputs}, 10


def model():
    return flat_model("mlp", (INPUTS,), CLASSES, ())


def load_data(context):
    return randn(20, INPUTS), arange(20) % CLASSES
"""

CLIENT = """
from latecomer.engines.flower_client import client_app
from round_trip.task import load_data, model

app = client_app(model, load_data)
"""

SERVER = """
from flwr.serverapp import ServerApp
from latecomer import Server, build_strategy
from latecomer.core.messages import TrainSpec
from latecomer.engines.flower import GridTransport
from latecomer.engines.virtual import Bounds
from latecomer.study.deployed import serve
from round_trip.task import model

app = ServerApp()


@app.main()
def main(grid, context):
    config, spec = context.run_config, TrainSpec(local_epochs=1, batch_size=20, lr=0.1)
    server = Server(model().init(1), build_strategy("fedasync", {}), spec, seed=1)
    bounds = Bounds(updates=int(config["updates"]))
    serve(GridTransport(grid, poll=0.1), server, str(config["folder"]), bounds, every=1000)
"""


def make_app(folder: Path, megabytes: float) -> Path:
    inputs = max(1, round((megabytes * 1e6 / 4 - 10) / 10))
    package = folder / "round_trip"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    for name, text in {
        "__init__": "",
        "task": TASK.format(inputs=inputs),
        "client_app": CLIENT,
        "server_app": SERVER,
    }.items():
        (package / f"{name}.py").write_text(text)
    return folder


def trips(app: Path, folder: Path, warm: bool, tls: bool, tasks: int) -> list[float]:
    with LocalFederation(app, 1, folder, tls=tls, warm=warm, slowest=0.0) as federation:
        federation.start()
        federation.run({"updates": tasks})
        how = federation.runs.wait(timeout=60 + 20 * tasks)
        if how != "finished:completed":
            raise SystemExit(f"the run has ended as {how}:\n{federation.runs.log()}")
        text = (federation.run_folder / "events.jsonl").read_text()
    sent: dict[int, float] = {}
    seconds = []
    for event in map(json.loads, text.splitlines()):
        if event["event"] == "dispatch":
            sent[event["task"]] = event["time"]
        elif event["event"] == "arrival":
            seconds.append(event["time"] - sent[event["task"]])
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--tls", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        app = make_app(Path(scratch) / "app", given.megabytes)
        for warm in (True, False):
            name = "warm" if warm else "stock"
            began = time.monotonic()
            found = trips(app, Path(scratch) / name, warm, given.tls, given.tasks)
            print(
                f"{name:5}  {given.megabytes:g} MB  median {statistics.median(found):.2f} s "
                f"({min(found):.2f} to {max(found):.2f}; {len(found)} tasks, "
                f"{time.monotonic() - began:.0f} s with set-up)",
                flush=True,
            )


if __name__ == "__main__":
    main()

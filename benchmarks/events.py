"""The event loop at scale: devices whose training costs nothing, counted per event.

An event is what the event log counts: a dispatch, an arrival or a commit. Nothing is trained, so
what is left is the engine, the server and the merge of a tiny model.

    python benchmarks/events.py [--quick]
"""

import argparse
import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from latecomer.core.messages import Note, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.recipe import build_strategy


class NoTraining:
    """Every device sends the same small step."""

    def __init__(self, size: int) -> None:
        self.delta = torch.full((size,), 1e-3)

    def examples(self, task: Task) -> int:
        return 100

    def update(self, task: Task) -> Update:
        return Update(task.id, self.delta, 100)

    def expect(self, task: Task, arrives: float) -> None: ...
    def forget(self, task_id: int) -> None: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}


def measure(devices: int, events: int, strategy: str) -> dict[str, float]:
    server = Server(torch.zeros(10), build_strategy(strategy), TrainSpec())
    counted = 0

    def count(time: float, note: Note) -> None:
        nonlocal counted
        counted += 1

    # Speeds drawn from a continuous distribution: hardly two events fall on the same moment.
    fleet = make_fleet("gamma", devices, seed=1)
    start = time.process_time()
    engine = VirtualEngine(server, fleet, NoTraining(10), range(devices), on_note=count)
    engine.run(Bounds(), lambda: counted < events)
    seconds = time.process_time() - start
    return {
        "devices": devices,
        "events": counted,
        "updates": server.accepted,
        "cpu_seconds": round(seconds, 3),
        "microseconds_per_event": round(1e6 * seconds / counted, 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--strategy", default="fedasync")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/events.json"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    events = 100_000 if options.quick else 1_000_000
    rows = [measure(devices, events, options.strategy) for devices in (100, 10_000, 100_000)]
    for row in rows:
        print(row)
    growth = rows[-1]["microseconds_per_event"] / rows[0]["microseconds_per_event"]
    print(f"cost per event at 100,000 devices / at 100 devices: {growth:.2f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "growth": growth}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Does an update cost more in a larger fleet? W1 with FedAsync, compiled kernel if installed.

Every device has data of its own and, under way, a model version of its own.

    python benchmarks/scaling.py [--quick]
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from workloads import W1

from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.recipe import build_strategy

ROUNDS = 3


def simulation(devices: int) -> VirtualEngine:
    model = W1.flat_model()
    kernel = compiled_kernel(model)
    model.kernel = kernel if isinstance(kernel, CompiledKernel) else None
    clients = {i: Client(i, model, x, y, 0) for i, (x, y) in enumerate(W1.data(devices))}
    server = Server(model.init(0), build_strategy("fedasync"), W1.spec)
    return VirtualEngine(server, make_fleet("gamma", devices), OneByOne(clients), clients)


def go_on(engine: VirtualEngine, updates: int) -> float:
    """CPU seconds for so many more updates."""
    start = time.process_time()
    engine.run(Bounds(updates=engine.server.accepted + updates), lambda: True)
    return time.process_time() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling.json"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    fleets = (100, 1_000) if options.quick else (100, 1_000, 10_000)
    updates = 300 if options.quick else 1_000
    engines = {devices: simulation(devices) for devices in fleets}
    # Everybody's first task, so that each fleet is in full swing before it is timed.
    for devices, engine in engines.items():
        go_on(engine, max(devices, 200))
    best = dict.fromkeys(fleets, float("inf"))
    for _ in range(ROUNDS):
        for devices, engine in engines.items():
            best[devices] = min(best[devices], go_on(engine, updates) / updates)
    for devices, seconds in best.items():
        print(f"{devices:7,} devices: {1e6 * seconds:7.1f} CPU microseconds per update")
    ratio = best[fleets[-1]] / best[fleets[0]]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"ratio {ratio:.2f}, peak memory {peak:,.0f} MB")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"seconds_per_update": best, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()

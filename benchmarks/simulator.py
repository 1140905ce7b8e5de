"""Client updates per CPU second: FedAsync in virtual time against a plain eager PyTorch loop.

Both run in this process, alternately, on one thread; the ratio is what counts. Peers that are
installed in virtual environments of their own (see benchmarks/peers) run in between.

    python benchmarks/simulator.py [--quick] [--kernels compiled,batched,plain] [--peers DIR]
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits
from workloads import W1, W2, Workload, eager_update

from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.engines.trainers import Batched, OneByOne, batch_size
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.recipe import build_strategy

DEVICES = 100
ROUNDS = 3
PEERS = Path(__file__).with_name("peers")


def trainer_for(
    workload: Workload, kernel: str, model: FlatModel, clients: dict[int, Client]
) -> OneByOne:
    if kernel == "batched":
        return Batched(clients, batch_size(model, workload.spec, workload.examples, 512))
    if kernel == "compiled":
        found = compiled_kernel(model)
        if not isinstance(found, CompiledKernel):
            raise SystemExit(f"compiled: {found}")
        model.kernel = found
    return OneByOne(clients)


def simulation(workload: Workload, kernel: str) -> Callable[[int], None]:
    """A function that lets a FedAsync run go on for so many updates."""
    model = workload.flat_model()
    data = workload.data(DEVICES)
    clients = {i: Client(i, model, x, y, seed=0) for i, (x, y) in enumerate(data)}
    server = Server(model.init(0), build_strategy("fedasync"), workload.spec)
    trainer = trainer_for(workload, kernel, model, clients)
    engine = VirtualEngine(server, make_fleet("tiers", DEVICES), trainer, clients)

    def go_on(updates: int) -> None:
        engine.run(Bounds(updates=server.accepted + updates), lambda: True)

    return go_on


def per_cpu_second(work: Callable[[int], None], updates: int) -> float:
    start = time.process_time()
    work(updates)
    return updates / (time.process_time() - start)


def measure(workload: Workload, kernels: list[str], quick: bool) -> dict[str, float]:
    """The best of some rounds for each, alternating, after a warm-up."""
    eager = eager_update(workload.flat_model().module, workload.data(DEVICES), workload.spec)

    def eager_loop(updates: int) -> None:
        for i in range(updates):
            eager(i)

    works = {"eager": eager_loop, **{k: simulation(workload, k) for k in kernels}}
    updates = (60 if workload is W2 else 300) * (1 if quick else 3)
    best = dict.fromkeys(works, 0.0)
    for work in works.values():
        work(updates // 5)
    for _ in range(ROUNDS):
        for name, work in works.items():
            best[name] = max(best[name], per_cpu_second(work, updates))
    return best


def peers(folder: Path) -> dict[str, float]:
    """Updates per CPU second of every peer that is installed under `folder`."""
    found = {}
    for name in ("appfl", "flgo", "flower", "pfl"):
        script = PEERS / f"{name}_w1.py"
        python = folder / name / "bin" / "python"
        if not python.exists():
            print(f"  {name}: not installed in {folder}, skipped (benchmarks/peers/README.md)")
            continue
        result = subprocess.run(
            [python, script], capture_output=True, text=True, timeout=300, check=False
        )
        try:
            line = json.loads(result.stdout.strip().splitlines()[-1])
            found[name] = line["updates_per_cpu_second"]
        except (IndexError, ValueError, KeyError):
            print(f"  {name}: failed: {result.stderr.strip().splitlines()[-1:]}")
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--kernels", default="compiled,batched,plain")
    arguments.add_argument("--peers", type=Path, default=Path(".peers"))
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/simulator.json"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    threadpool_limits(1)
    results: dict[str, dict[str, float]] = {}
    for workload in (W1, W2):
        rates = measure(workload, options.kernels.split(","), options.quick)
        if workload is W1 and not options.quick:
            rates |= peers(options.peers)
        results[workload.name] = rates
        print(f"{workload.name}: updates per CPU second, and the ratio to the eager loop")
        for name, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
            print(f"  {name:10} {rate:8.1f}  {rate / rates['eager']:6.2f}x")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

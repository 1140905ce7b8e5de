"""How near a merge comes to the speed of memory, at 1, 10 and 100 million parameters.

A FedAsync merge reads head, base and delta and writes the new head: four streams. What memory
gives is measured beside it with the simplest operation on as many bytes, c = a + b in place.

    python benchmarks/aggregation.py [--quick]
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.strategy import mixed
from latecomer.engines.memory import keep_freed_memory
from latecomer.strategies.parts.merging import moved

ROUNDS = 15


def best_of(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def contribution(size: int) -> Contribution:
    base, delta = torch.randn(size), torch.randn(size)
    task = Task(0, 0, 0, "main", 0, TrainSpec(), base)
    return Contribution(task, Update(0, delta, 1), base, delta, "main", 3, 0.3)


def measure(size: int) -> dict[str, float]:
    head, one = torch.randn(size), contribution(size)
    ten = [contribution(size) for _ in range(10 if size <= 10_000_000 else 2)]
    a, b, c = torch.randn(size), torch.randn(size), torch.empty(size)
    stream = best_of(lambda: torch.add(a, b, out=c)) / 3
    held = head

    def mix() -> None:
        # As in a run: the old head is let go when the new one is there.
        nonlocal held
        held = mixed(held, one, 0.3)

    mix_seconds = best_of(mix)
    buffer_seconds = best_of(lambda: moved(head, ten, mean=False, step=1.0))
    streams = len(ten) + 2
    return {
        "parameters": size,
        "gigabytes_per_second": round(4e-9 * size / stream, 1),
        "mix_ms": round(1e3 * mix_seconds, 3),
        "mix_over_bandwidth": round(mix_seconds / (4 * stream), 2),
        f"buffer_of_{len(ten)}_ms": round(1e3 * buffer_seconds, 3),
        "buffer_over_bandwidth": round(buffer_seconds / (streams * stream), 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/aggregation.json"))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    sizes = [1_000_000, 10_000_000] + ([] if options.quick else [100_000_000])
    rows = [measure(size) for size in sizes]
    for row in rows:
        print(row)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Does memory grow with the number of updates? Resident memory of one long run, sampled.

python benchmarks/memory.py            # 1,000 devices, 20,000 updates
python benchmarks/memory.py --quick    # 200 devices, 4,000 updates
"""

import argparse
import json
import os
from pathlib import Path

import torch

from latecomer.study.config import parse
from latecomer.study.experiment import Experiment

SAMPLES = 10


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/memory.json"))
    options = arguments.parse_args()
    devices, updates = (200, 4_000) if options.quick else (1_000, 20_000)
    torch.set_num_threads(1)
    experiment = Experiment(
        parse(
            {
                "fleet": {"devices": devices, "profile": "phones"},
                "strategy": {"name": "fedasync"},
                "stop": {"updates": updates},
            }
        )
    )
    server = experiment.server()
    engine = experiment.engine(server)
    rows: list[dict[str, float]] = []

    def sample() -> bool:
        if server.accepted >= len(rows) * updates / SAMPLES:
            rows.append(
                {
                    "updates": server.accepted,
                    "resident_mb": round(resident_megabytes(), 1),
                    "stored_versions": len(server.store.versions),
                }
            )
            print(rows[-1], flush=True)
        return True

    engine.run(experiment.bounds(server.strategy), sample)
    half = rows[len(rows) // 2]["resident_mb"]
    growth = rows[-1]["resident_mb"] / half
    print(f"second half / middle: {growth:.3f} of the resident memory")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"devices": devices, "rows": rows, "growth": growth}))


if __name__ == "__main__":
    main()

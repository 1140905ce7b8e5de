"""Model hashes of one small run per family of strategies: a refactoring must leave them unchanged.

`python benchmarks/hashes.py > before.txt`, change the code, run it again into after.txt, compare.
One line per run: name, the first 16 digits of `model_hash`, updates, versions, accuracy. The line
`resumed` is a run that was killed after a checkpoint and resumed; it equals `killed-never`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BASE = {
    "data.alpha": 0.3,
    "fleet.devices": 20,
    "fleet.profile": "tiers",
    "model.hidden": [32],
    "training.lr": 0.1,
    "stop.updates": 400,
    "evaluate.every": 200,
}
LATE = {"fleet.late.classes": [5], "fleet.late.devices": 3, "fleet.late.delay": 8}
EPOCHS = {**LATE, "stop.updates": 300}
RUNS: dict[str, dict[str, object]] = {
    "fedasync": {"strategy.name": "fedasync"},
    "fedbuff": {"strategy.name": "fedbuff"},
    "fedavg": {"strategy.name": "fedavg", "stop.updates": 200},
    "semi-async-late": {"strategy.name": "semi-async", **EPOCHS},
    "oort": {"strategy.name": "oort", "stop.updates": 200},
    "ca2fl": {"strategy.name": "ca2fl"},
    "safa": {"strategy.name": "safa", "stop.updates": 200},
    "fedsea": {"strategy.name": "fedsea", "stop.updates": 200},
    "aso-fed": {"strategy.name": "aso-fed", "stop.updates": 200},
    "asyn-tiers": {"strategy.name": "asyn-tiers", "stop.updates": 200},
    "fadas": {"strategy.name": "fadas"},
    "w-pred-late": {"strategy.name": "w-pred", **EPOCHS},
    "robust-fedbuff": {"strategy.name": "robust-fedbuff"},
    "feddc-late": {"strategy.name": "feddc", **EPOCHS},
    "feddc-fedbuff-late": {"strategy.name": "feddc-fedbuff", **EPOCHS},
    "echopfl": {"strategy.name": "echopfl", "stop.updates": 600},
    "ifca": {"strategy.name": "ifca", "stop.updates": 200},
    "clusterfl": {"strategy.name": "clusterfl", "stop.updates": 200},
    "privaasyncfed-private": {
        "strategy.name": "privaasyncfed",
        "privacy.epsilon": 10.0,
        "stop.updates": 200,
    },
    "heterofl-submodels": {"strategy.name": "heterofl", "stop.updates": 200},
    "fedbuff-measured": {
        "strategy.name": "fedbuff",
        "submodels.level": "measured",
        "submodels.widths": [1.0, 0.5],
    },
    "latecomer": {"strategy.name": "latecomer", "stop.updates": 1200},
    "latecomer-late": {"strategy.name": "latecomer", **LATE, "stop.updates": 1200},
    "latecomer-private": {
        "strategy.name": "latecomer",
        "privacy.epsilon": 20.0,
        "stop.updates": 300,
    },
    "latecomer-busy-phones": {
        "strategy.name": "latecomer",
        **LATE,
        "fleet.late.kind": "busy",
        "fleet.profile": "phones",
        "stop.updates": 600,
    },
    "latecomer-submodels": {
        "strategy.name": "latecomer",
        "submodels.level": "declared",
        "submodels.widths": [1.0, 0.5],
        "stop.updates": 500,
    },
    "latecomer-drift": {
        "strategy.name": "latecomer",
        "data.drift.kind": "shift",
        "data.drift.begin": 5.0,
        "stop.updates": 1200,
    },
    "killed-never": {"strategy.name": "latecomer", **LATE, "stop.updates": 2000},
    "resumed": {"strategy.name": "latecomer", **LATE, "stop.updates": 2000},
}


def command(settings: dict[str, object], out: Path) -> list[str]:
    sets = [
        part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    return [sys.executable, "-m", "latecomer", "run", "--quiet", "--out", str(out), *sets]


def run(name: str, out: Path) -> str:
    """Run one of `RUNS` in a process of its own; returns its line."""
    settings = {**BASE, **RUNS[name]}
    if name == "resumed":
        process = subprocess.Popen(command({**settings, "checkpoint.every": 300}, out))
        deadline = time.monotonic() + 120
        while not any((out / "checkpoint").glob("*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resume = [sys.executable, "-m", "latecomer", "run", "--quiet", "--resume", str(out)]
        done = subprocess.run(resume, capture_output=True, text=True)
    else:
        done = subprocess.run(command(settings, out), capture_output=True, text=True)
    if done.returncode:
        return f"{name:24} failed: {done.stderr.strip().splitlines()[-1:]}"
    found = json.loads((out / "summary.json").read_text())
    accuracy = found["accuracy"], found["client_accuracy"]["mean"]
    parts = (
        found["model_hash"][:16],
        found["updates"],
        found["versions"],
        *(f"{a:.4f}" for a in accuracy),
    )
    return " ".join([f"{name:24}", *map(str, parts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RUNS)}")
    names = parser.parse_args().names or list(RUNS)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(run(name, Path(folder) / name), flush=True)


if __name__ == "__main__":
    main()

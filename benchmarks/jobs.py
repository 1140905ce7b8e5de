"""How well `compare --jobs 2` uses two cores: wall time against `--jobs 1`, same runs.

python benchmarks/jobs.py [--seconds 3200]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCENARIO = Path(__file__).parents[1] / "examples" / "tiers.toml"


def wall_seconds(jobs: int, virtual_seconds: float, folder: Path) -> float:
    options = {
        "--strategies": "semi-async,fedasync,fedbuff",
        "--seeds": "1,2,3,4",
        "--set": f"stop.virtual_seconds={virtual_seconds}",
        "--jobs": str(jobs),
        "--out": str(folder / str(jobs)),
    }
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "latecomer", "compare", str(SCENARIO), "--quiet", *words]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=3200.0)
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/jobs.json"))
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = {jobs: wall_seconds(jobs, options.seconds, Path(folder)) for jobs in (1, 2)}
    ratio = times[1] / times[2]
    print(f"12 runs: {times[1]:.1f} s alone, {times[2]:.1f} s two at a time: {ratio:.2f}x")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"seconds": times, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()

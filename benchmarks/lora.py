"""Bytes, cached updates, checkpoint and memory of LoRA against full fine-tuning, side by side.

python benchmarks/lora.py           # ca2fl and latecomer; prints the table of docs/your-own.md
python benchmarks/lora.py --page    # and writes it into the page
python benchmarks/lora.py --quick   # a narrow network and few updates

The network and the data are those of examples/your_own/lora.py, with wider layers. Every run has
its own process. Its peak memory is counted from the beginning of the federated run.
"""

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/your-own.md"
BEGIN, END = "<!-- written by: python benchmarks/lora.py --page -->", "<!-- end -->"
STRATEGIES = ("ca2fl", "latecomer")
DEVICES = 20  # as in the example
ROWS = {
    "parameters trained": ("trained", 0),
    "kB up per update": ("up", 1),
    "kB down per task": ("down", 1),
    "MB of the strategy's state (cached updates)": ("state", 2),
    "MB of a checkpoint": ("checkpoint", 2),
    "MB of memory beyond the start": ("memory", 0),
}


def status(key: str) -> float:
    """A line of /proc/self/status in MB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, key
    return int(found[1]) / 1024


def experiment_of(strategy: str, rank: int, width: int, updates: int) -> Any:
    """The experiment that the example would run."""
    import latecomer
    from latecomer.study.config import merged, parse
    from latecomer.study.experiment import Experiment
    from latecomer.study.given import Given

    def instead_of_run(config: Any, out: str, name: str, model: Any, data: Any) -> Any:
        tree = merged(config, {"strategy": {"name": name}})
        return Experiment(parse(tree), given=Given(model=model, data=data))

    sys.path.insert(0, str(ROOT / "examples/your_own"))
    import lora

    latecomer.run = instead_of_run  # type: ignore[assignment]
    return lora.main(updates, "", strategy, rank, width)


def measure(strategy: str, rank: int, width: int, updates: int) -> dict[str, float]:
    """The numbers of one run in this process."""
    import torch

    from latecomer.core.codec import encode
    from latecomer.engines.virtual import Bounds
    from latecomer.study.checkpoint import Checkpoints

    torch.set_num_threads(1)
    experiment = experiment_of(strategy, rank, width, updates)
    # Once before, so that libraries and code are loaded.
    experiment.engine(experiment.server()).run(Bounds(updates=DEVICES), lambda: True)
    server = experiment.server()
    engine = experiment.engine(server)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier steps freed does not hide new memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    engine.run(experiment.bounds(server.strategy), lambda: True)
    memory = status("VmHWM") - before
    tensors = encode(server.parts.state())[1]
    with tempfile.TemporaryDirectory() as folder:
        Checkpoints(Path(folder)).save({"server": server.state(), "engine": engine.state()}, "one")
        checkpoint = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {
        "trained": server.model().numel(),
        "up": engine.bytes_up / server.accepted / 1e3,
        "down": engine.bytes_down / server.tasks_given / 1e3,
        "state": sum(tensor.nbytes for tensor in tensors.values()) / 1e6,
        "checkpoint": checkpoint / 1e6,
        "memory": memory,
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """A Markdown table: LoRA and full fine-tuning of each strategy, and their ratios."""
    heads = [f"{name}, {how}" for name in found for how in ("LoRA", "full", "ratio")]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for label, (key, digits) in ROWS.items():
        cells = []
        for each in found.values():
            few, all_ = each["LoRA"][key], each["full"][key]
            cells += [f"{few:,.{digits}f}", f"{all_:,.{digits}f}", f"{few / all_:.3f}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("STRATEGY", "RANK", "WIDTH", "UPDATES"))
    options = parser.parse_args()
    if options.one:
        name, *numbers = options.one
        print(json.dumps(measure(name, *map(int, numbers))))
        return
    width, updates = (128, 60) if options.quick else (768, 120)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in STRATEGIES:
        for how, rank in (("LoRA", 4), ("full", 0)):
            command = [sys.executable, __file__, "--one", name, *map(str, (rank, width, updates))]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            numbers = json.loads(done.stdout.splitlines()[-1])
            found.setdefault(name, {})[how] = numbers
            print(name, how, numbers, file=sys.stderr, flush=True)
    text = table(found)
    print(text)
    if options.page:
        note = f"{updates} updates of {DEVICES} devices, layers of {width} units, rank 4:"
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{note}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()

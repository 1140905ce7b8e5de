"""CPU seconds of a run with and without a reader of its live page.

The same run alternates between both, each in its own process. CPU seconds depend little on other
load of the machine; those of the web server are reported too.

    python benchmarks/watching.py [--rounds N]
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from statistics import median

RUN = ["fleet.devices=300", "fleet.profile=phones", "stop.updates=10000", "evaluate.every=100"]


def latecomer(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "latecomer", *arguments]


def run_once(folder: Path) -> tuple[float, float]:
    """CPU and wall seconds of one run."""
    shutil.rmtree(folder, ignore_errors=True)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    settings = [part for setting in RUN for part in ("--set", setting)]
    command = latecomer("run", "--quiet", *settings, "--out", str(folder))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - begun


class Reader:
    """Reads the document stream of a run, as a browser tab does."""

    def __init__(self, port: int, run: str) -> None:
        self.port, self.run = port, run
        self.documents = self.bytes = 0
        self.ended = False
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _get(self, path: str) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        return connection

    def _read(self) -> None:
        while f'"{self.run}"' not in self._get("/api/runs").getresponse().read().decode():
            time.sleep(0.2)
        stream = self._get(f"/api/stream?run={self.run}").getresponse()
        while not self.ended:
            line = stream.readline()
            self.documents += line == b"event: run\n"
            self.bytes += len(line)


def cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/watching.json"))
    options = arguments.parse_args()
    root = Path(tempfile.mkdtemp())
    page = subprocess.Popen(
        latecomer("watch", str(root), "--port", "0"), stdout=subprocess.PIPE, text=True
    )
    assert page.stdout is not None
    found = re.search(r":(\d+)/", page.stdout.readline())
    assert found is not None
    rows = []
    try:
        for k in range(options.rounds):
            row: dict[str, float] = {}
            # The order alternates, so that slow changes of the machine affect both.
            for name in ("alone", "watched") if k % 2 else ("watched", "alone"):
                run = f"{name}-{k}"
                before = cpu_of(page.pid)
                reader = Reader(int(found[1]), run) if name == "watched" else None
                row[f"{name}_cpu"], row[f"{name}_wall"] = run_once(root / run)
                if reader is not None:
                    reader.ended = True
                    row["page_cpu"] = cpu_of(page.pid) - before
                    row["documents"], row["megabytes"] = reader.documents, reader.bytes / 1e6
            rows.append({name: round(value, 2) for name, value in row.items()})
            print(rows[-1])
    finally:
        page.send_signal(signal.SIGINT)
        page.wait(30)
        shutil.rmtree(root, ignore_errors=True)
    ratio = median(r["watched_cpu"] / r["alone_cpu"] for r in rows)
    print(f"CPU seconds of the run, watched / alone, median over rounds: {ratio:.3f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Fifty nodes on one SuperLink for ten minutes. Left out unless asked for: `pytest -m soak -s`.

SOAK_NODES and SOAK_SECONDS make it smaller. The figures are in docs/reliability.md.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from light_federation import HIDDEN, LightFederation, LightRun

pytestmark = [pytest.mark.soak, pytest.mark.slow]

NODES = int(os.environ.get("SOAK_NODES", "50"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SLOWEST = 20.0  # seconds that the slowest device trains
PROGRAM = Path(__file__).parents[1] / "many_nodes.py"


def megabytes(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_many_nodes_for_a_long_time(tmp_path):
    with LightFederation(tmp_path, 0) as federation:
        federation.start()
        arguments = [federation.server.address, NODES, tmp_path / "devices", HIDDEN, SLOWEST]
        with (tmp_path / "nodes.log").open("wb") as output:
            nodes = subprocess.Popen(
                [sys.executable, str(PROGRAM), *map(str, arguments)],
                env=federation.server.environment,
                stdout=output,
                stderr=output,
            )
        try:
            soak(federation, LightRun(federation, tmp_path / "run", probe=300.0), nodes.pid)
        finally:
            nodes.kill()
            nodes.wait()
            print((tmp_path / "nodes.log").read_text()[-2000:])


def soak(federation, run, nodes):
    run.start()
    run.until(lambda: len(run.events("introduction")) == NODES, 300.0, "all nodes")
    (server,) = federation.runs.serverapps()
    link = federation.server.superlink.pid
    run.more(NODES, within=300.0)
    began, first = time.monotonic(), len(run.arrivals())
    before = {pid: cpu_seconds(pid) for pid in (server.pid, link, nodes)}
    memory = []
    while (past := time.monotonic() - began) < SECONDS:
        memory.append((past, megabytes(server.pid), megabytes(link)))
        time.sleep(min(10.0, SECONDS / 10))
    arrivals = run.arrivals()
    rate = (len(arrivals) - first) / past
    names = {server.pid: "server's app", link: "SuperLink", nodes: "nodes"}
    for pid, name in names.items():
        print(f"    {name}: {(cpu_seconds(pid) - before[pid]) / past:.2f} cores")
    third = len(memory) // 3
    early, late = (
        median(m[1] for m in part) for part in (memory[third : 2 * third], memory[-third:])
    )
    last = {e["device"]: e["time"] for e in arrivals}
    trouble = Counter(e["event"] for e in run.events("refusal", "drop", "away", "overdue"))
    per_device = Counter(e["device"] for e in arrivals)
    print(
        f"    {len(arrivals) - first} updates in {past:.0f} s: {rate:.1f} a second; {dict(trouble)}"
    )
    print(f"    a device: {min(per_device.values())} to {max(per_device.values())} updates")
    print(f"    memory of the server's app {early:.1f} MB in the middle, {late:.1f} MB at the end")
    print("    " + " ".join(f"{past:.0f}s:{mine:.0f}/{links:.0f}" for past, mine, links in memory))
    newest = max(last.values())
    assert len(per_device) == NODES
    assert all(newest - when < 120.0 for when in last.values()), "a device has been forgotten"
    assert set(trouble) <= {"away"}  # a busy SuperLink can lose a node: it comes back
    assert late - early < 10.0
    tasks = [e["task"] for e in arrivals]
    assert len(tasks) == len(set(tasks))
    commits = [e["version"] for e in run.events("commit")]
    assert all(b == a + 1 for a, b in pairwise(commits))
    (run.folder / "figures.json").write_text(json.dumps({"rate": rate, "memory": memory}))

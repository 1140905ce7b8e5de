"""Fault tolerance of a federation with real processes: kills, stops, invalid replies.

Every run ends with `check_log`: no commit lost, none applied twice. The outcomes are in
docs/reliability.md, and measured anew with `-s`.
"""

import signal
import subprocess
import time
from itertools import pairwise

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from latecomer.deploy.certificates import make_node_key
from latecomer.deploy.node import NodeOptions, config_text, supernode_command
from light_federation import LightFederation, LightRun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Four devices, each known by its key. They heal themselves, so the tests share them."""
    with LightFederation(tmp_path_factory.mktemp("faults"), 4, tls=True) as started:
        started.start()
        yield started


@pytest.fixture
def run(federation, request, tmp_path):
    """A run of the test's own, with all four devices at work."""
    for device in range(4):
        federation.instruct(device)
    run = LightRun(federation, tmp_path / "run", **getattr(request, "param", {}))
    run.start()
    run.until(lambda: all(run.arrivals(d) for d in range(4)), 90.0, "an update of every device")
    yield run
    if federation.runs.serverapps():  # a test that has failed must not hurt the next one
        federation.runs.cancel(run.number)


def report(what, seconds):
    print(f"\n    {what}: {seconds:.1f} s", end="")


def longest_silence(run, device, since):
    """Seconds between two updates of a device at most, from that moment of the run on."""
    times = [since, *(e["time"] for e in run.arrivals(device) if e["time"] > since)]
    return max((b - a for a, b in pairwise(times)), default=float("inf"))


FAULTS = {
    "nan": "delta is not finite",
    "shape": "the array has shape (1, 91), must be (1, 90)",
    "bytes": "the array has more bytes than",
    "task": "the reply is for another task",
    "examples": "num_examples must be a whole number from 1 to 1,000",
    "negative": "num_examples must be a whole number from 1 to 1,000",
    "fresh": "choice must be the number of a model it was sent",
    "metrics": "more than 10,000 metrics",
    "norm": "(20 x the",
}


def test_faulty_and_malicious_devices_are_refused_with_a_reason(federation, run):
    since = run.events()[-1]["time"]
    # After each fault an honest answer, which makes up for it: else the back-off would grow.
    some, others = list(FAULTS)[:4], list(FAULTS)[4:]
    federation.instruct(0, seconds=0.0)  # as fast as it can
    federation.instruct(1, [f for fault in ["raise", *some] for f in (fault, "")])
    federation.instruct(2, [f for fault in others for f in (fault, "")])
    federation.instruct(3, ["exit"])
    reasons = list(FAULTS.values())

    def reasons_so_far():
        return [e["reason"] for e in run.events("refusal", "drop")]

    def missing():
        return [
            reason for reason in reasons if not any(reason in each for each in reasons_so_far())
        ]

    run.until(
        lambda: any("instructed to fail" in each for each in reasons_so_far()), 60.0, "the error"
    )
    run.until(lambda: not missing(), 120.0, "every fault to be refused")
    run.until(lambda: run.events("drop", device=3), 90.0, "the crash to be noticed")
    (crash,) = run.events("drop", device=3)
    (before,) = [e for e in run.events("dispatch", device=3) if e["task"] == crash["task"]]
    report("a client that exits: noticed after", crash["time"] - before["time"])
    for device in (1, 2, 3):
        run.more(1, device)
    assert longest_silence(run, 0, since) < 15.0
    assert max(len(run.arrivals(d)) for d in (1, 2, 3)) > 3
    run.finish()


def test_a_node_that_is_not_registered_is_refused(federation, run, tmp_path):
    key, _ = make_node_key(tmp_path, "stranger")
    options = NodeOptions(
        federation.server.address,
        0,
        config_text({"device-id": "stranger", "partition-id": 9, "num-partitions": 10}),
        federation.server.certificates.authority,
        key,
    )
    environment = {**federation.server.environment, "FLWR_HOME": str(tmp_path)}
    began = time.monotonic()
    done = subprocess.run(
        supernode_command(options, tmp_path / "none"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    report("a node without registration: refused after", time.monotonic() - began)
    assert done.returncode != 0
    assert "SuperNode ID" not in done.stdout + done.stderr
    run.more(5)
    run.finish()
    assert len(run.events("introduction")) == 4


def test_nodes_killed_and_frozen_for_a_minute_come_back_to_their_tasks(federation, run):
    """Long enough for Flower to give them up; with its key a node is refused until it has."""
    since = run.events()[-1]["time"]
    lost = {}
    for device in (2, 3):
        federation.instruct(device, seconds=3.0)
        begun = len(federation.begun(device))
        run.until(lambda d=device, n=begun: len(federation.begun(d)) > n + 1, 60.0, "a task")
        lost[device] = int(federation.begun(device)[-1].rpartition("-")[2])
        node = federation.nodes[device]
        if device == 2:
            killed_at = time.monotonic()
            node.client.kill()
            node.supernode.kill()
        else:
            frozen_at, frozen = time.monotonic(), [part.process for part in node.parts]
            for process in frozen:
                process.send(signal.SIGSTOP)
    try:
        for device, name, began in ((2, "killed", killed_at), (3, "frozen", frozen_at)):
            run.until(lambda d=device: run.events("away", device=d), 120.0, "the loss")
            report(f"a {name} node: noticed after", time.monotonic() - began)
    finally:
        for process in frozen:
            process.send(signal.SIGCONT)
    thawed_at = time.monotonic()
    for device, name, began in ((3, "frozen", thawed_at), (2, "killed", killed_at)):
        done = lambda d=device: lost[d] in [e["task"] for e in run.arrivals(d)]  # noqa: E731
        run.until(done, 120.0, f"the task of device-{device}")
        kind = "since it goes on" if device == 3 else "since its death"
        report(f"a {name} node: its task was accepted, {kind}", time.monotonic() - began)
    assert not run.events("drop", "refusal")
    assert longest_silence(run, 0, since) < 15.0
    run.finish()


@pytest.mark.parametrize("run", [{"hidden": 16384}], indirect=True)  # 0.7 MB
def test_a_stalled_upload_delays_no_other_and_is_accepted_in_the_end(federation, run):
    since, seen = run.events()[-1]["time"], len(federation.answered(3))
    run.until(lambda: len(federation.answered(3)) > seen, 60.0, "an answer of device-3")
    node = federation.nodes[3].supernode.process
    node.send(signal.SIGSTOP)
    stalled = int(federation.answered(3)[-1].rpartition("-")[2])
    try:
        began = run.events()[-1]["time"]
        time.sleep(20.0)
        assert len([e for e in run.arrivals() if e["time"] > began]) >= 8
        arrived = [e["task"] for e in run.arrivals(3)]
    finally:
        node.send(signal.SIGCONT)
    assert stalled not in arrived
    waited = run.until(
        lambda: stalled in [e["task"] for e in run.arrivals(3)], 60.0, "the stalled update"
    )
    report("a stalled upload: accepted after it continued", waited)
    assert longest_silence(run, 0, since) < 15.0
    run.finish()


def test_the_run_survives_the_superlink(federation, run):
    (server,) = federation.runs.serverapps()
    federation.instruct(2, seconds=6.0)
    seen = len(federation.begun(2))
    run.until(lambda: len(federation.begun(2)) > seen + 1, 60.0, "a task of device-2 to begin")
    task = int(federation.begun(2)[-1].rpartition("-")[2])
    count, killed_at = len(run.arrivals()), time.monotonic()
    federation.server.superlink.kill()
    run.until(lambda: not federation.server.is_healthy(), 5.0, "the SuperLink to be gone")
    run.until(federation.server.is_healthy, 30.0, "the SuperLink to be back")
    report("a killed SuperLink: back after", time.monotonic() - killed_at)
    assert time.monotonic() - killed_at < 10.0
    run.until(lambda: len(run.arrivals()) > count, 60.0, "an update")
    report("    first update after", time.monotonic() - killed_at)
    run.until(lambda: task in [e["task"] for e in run.arrivals(2)], 60.0, "the task of device-2")
    report("    the update that was in training after", time.monotonic() - killed_at)
    for device in range(4):
        run.more(2, device)
    report("    all devices at work after", time.monotonic() - killed_at)
    assert federation.runs.serverapps() == [server]
    federation.instruct(2)
    run.finish()


def test_a_killed_server_goes_on_from_its_last_commit_when_resubmitted(federation, run):
    federation.instruct(2, seconds=8.0)
    seen = len(federation.begun(2))
    run.until(lambda: len(federation.begun(2)) > seen + 1, 60.0, "a task of device-2 to begin")
    key = federation.begun(2)[-1]
    (server,) = federation.runs.serverapps()
    killed_at = time.monotonic()
    server.send(signal.SIGKILL)
    run.until(lambda: not server.is_alive(), 5.0, "the server's app to be gone")
    run.remember()
    count = run.text().count('"arrival"')
    run.start()
    run.until(lambda: run.events("resume"), 60.0, "the run to go on")
    report("a killed server: resumed after", time.monotonic() - killed_at)
    run.until(lambda: run.text().count('"arrival"') > count, 60.0, "an update")
    report("    first update after", time.monotonic() - killed_at)
    task = int(key.rpartition("-")[2])
    run.until(lambda: task in [e["task"] for e in run.arrivals(2)], 90.0, "the task in training")
    report("    the answer to the old run used after", time.monotonic() - killed_at)
    federation.instruct(2)
    for device in range(4):
        run.more(2, device)
    # It was asked twice and answered twice with one and the same work.
    assert federation.begun(2).count(key) == 2
    run.finish()

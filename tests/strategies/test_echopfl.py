"""EchoPFL as a whole: its limits, and runs with two planted clusters."""

import json
from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from dying import DieAfter, Killed
from latecomer.errors import BadInput
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.recipe import build_strategy
from latecomer.study.config import parse
from latecomer.study.runner import resume_run, start_run
from toy import ToyRun, toy_fleet, toy_server

ALONE = {"clusters": 1, "max_ratio": 1.0, "broadcast": "never"}
TINY = {
    "seed": 1,
    "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.5},
    "fleet": {"devices": 10, "profile": "tiers"},
    "model": {"hidden": [8]},
    "training": {"lr": 0.1},
    "strategy": {"name": "echopfl"},
    "stop": {"updates": 60},
}


def run(folder, strategy, progress=None, **changes):
    config = parse({**TINY, **changes, "strategy": strategy})
    summary = start_run(config, folder, progress)
    return {**summary, "wall_seconds": 0}


# Limits


def toy(name, fleet=None, updates=120, **options):
    run = ToyRun(toy_server(name, options), fleet or toy_fleet())
    run.until(updates)
    return run


@pytest.mark.parametrize("decay", ["polynomial", "hinge", "constant"])
def test_one_cluster_without_broadcast_is_fedasync_bit_for_bit(decay):
    fleet = toy_fleet(6, crash=0.1, restart_seconds=3, detect_seconds=1)
    one = toy("echopfl", fleet, decay=decay, **ALONE)
    other = toy("fedasync", fleet, decay=decay)
    assert one.log == other.log
    assert one.heads() == other.heads()
    assert one.server.spec == other.server.spec
    assert one.server.store.versions == other.server.store.versions


def test_it_is_more_than_fedasync_otherwise():
    assert toy("echopfl", **{**ALONE, "broadcast": "always"}).heads() != toy("fedasync").heads()
    assert toy("echopfl", broadcast="never").heads() != toy("fedasync").heads()


def test_one_cluster_without_broadcast_is_fedasync_on_digits(tmp_path):
    one = run(tmp_path / "one", {"name": "echopfl", **ALONE})
    other = run(tmp_path / "other", {"name": "fedasync"})
    assert one["model_hash"] == other["model_hash"]
    different = {key for key in one if one[key] != other[key]}
    assert different == {"strategy", "clusters", "cluster_members"}
    assert one["clusters"] == {"final": 1, "splits": 0, "merges": 0, "broadcasts": 0}


def test_with_one_device_there_is_nothing_to_broadcast():
    always, never = (toy("echopfl", toy_fleet(1), 30, broadcast=p) for p in ("always", "never"))
    assert always.log == never.log
    assert always.heads() == never.heads()


@pytest.mark.parametrize(
    "options",
    [
        {"max_ratio": 0.5},
        {"clusters": 0},
        {"broadcast": "often"},
        {"measure": "mood"},
        {"margin": 0},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(BadInput):
        build_strategy("echopfl", options)


# Runs of any kind


def test_a_fleet_that_loses_tasks_and_devices():
    fleet = toy_fleet(8, crash=0.2, dropout=0.01, restart_seconds=3, detect_seconds=2)
    run = toy("echopfl", fleet, 300, broadcast="always", every=5, ask=2)
    store, tasks = run.server.store, run.server.open_tasks.values()
    sent = Counter(version for task in tasks for version in task.versions)
    assert all(store.pins(version) == sent[version] for version in store.versions)
    assert run.lines("drop")


def test_what_is_kept_does_not_grow_with_time():
    def kept(updates):
        run = toy("echopfl", toy_fleet(8), updates, every=5, ask=2)
        state = run.server.state()["parts"]
        members, clusters = state["route"]["members"], state["route"]["clusters"]
        records = state["observers.0"]["records"]
        lists = [len(r.changes) + len(r.features) for r in records.values()]
        return len(members), len(clusters), len(records), max(lists)

    early, late = kept(150), kept(600)
    assert late[0] == early[0] == 8
    assert max(early[1:3] + late[1:3]) <= 6
    assert max(early[3], late[3]) <= 20


# Two label permutations of the same pictures


def two_permutations(path, seed, devices=16, examples=60):
    """Write digits of two label permutations; which permutation each device has."""
    rng, digits = np.random.default_rng(seed), load_digits()
    pictures = digits.images[:, None].astype(np.float32) / 16
    permutation = np.arange(devices) % 2
    chosen = [rng.choice(len(pictures), examples, replace=False) for _ in permutation]
    np.savez(
        path,
        x=np.concatenate([pictures[some] for some in chosen]),
        y=np.concatenate(
            [(digits.target[s] + w) % 10 for s, w in zip(chosen, permutation, strict=True)]
        ),
        subject=np.repeat(np.arange(devices), examples),
    )
    return permutation


def planted(folder, seed, updates=900, progress=None, **options):
    permutation = two_permutations(folder / "permuted.npz", seed)
    summary = run(
        folder / "run",
        {"name": "echopfl", "every": 10, **options},
        progress,
        seed=seed,
        data={
            "source": "npz",
            "path": str(folder / "permuted.npz"),
            "partition": "by-subject",
        },
        fleet={"devices": len(permutation), "profile": "tiers"},
        model={"hidden": [32]},
        training={"lr": 0.2},
        stop={"updates": updates},
        evaluate={"every": 300},
        checkpoint={"every": 50},
    )
    return permutation, summary


def events(folder):
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").open()]


def assignments(folder):
    """The cluster of every device at the end, from the log."""
    found, into = {}, {}
    for event in events(folder):
        if event["event"] == "arrival":
            found[event["device"]] = event["lineage"]
        elif event["event"] == "merge":
            into[event["lineage"]] = event["into"]
    for device, lineage in found.items():
        while lineage in into:
            lineage = into[lineage]
        found[device] = lineage
    return [found[device] for device in sorted(found)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    return folder, *planted(folder, seed=1)


def test_two_planted_clusters_are_found(found):
    folder, permutation, _ = found
    assert adjusted_rand_score(permutation, assignments(folder)) == 1.0


def test_the_cluster_models_fit_their_devices(found):
    """One model for both label permutations is right in half of the cases at best."""
    assert found[2]["client_accuracy"]["mean"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_whatever_the_seed(tmp_path, seed):
    permutation, _ = planted(tmp_path, seed)
    assert adjusted_rand_score(permutation, assignments(tmp_path)) == 1.0


def test_the_summary_counts_clusters_splits_merges_and_broadcasts(found):
    folder, _, summary = found
    seen = Counter(event["event"] for event in events(folder))
    assert summary["clusters"] == {
        "final": 2,
        "splits": seen["split"],
        "merges": seen["merge"],
        "broadcasts": seen["broadcast"],
    }
    assert seen["split"] - seen["merge"] == 1
    assert seen["broadcast"] > 0
    models = {path.name for path in (folder / "run").glob("model*.safetensors")}
    assert len(models) == 2


def test_the_bytes_of_broadcasts_and_offers_are_on_the_downlink(found):
    folder, _, summary = found
    pushed = [event["bytes"] for event in events(folder) if event["event"] == "broadcast"]
    sent = [event["bytes"] for event in events(folder) if event["event"] == "dispatch"]
    assert summary["bytes"]["down"] == sum(pushed) + sum(sent)
    assert max(sent) >= 2 * min(sent)  # an offer holds several models


def test_broadcasts_reduce_staleness(found, tmp_path):
    never = planted(tmp_path, seed=1, updates=200, broadcast="never")[1]
    assert never["clusters"]["broadcasts"] == 0
    assert found[2]["staleness"]["mean"] < never["staleness"]["mean"]


@pytest.mark.slow  # shorter runs are resumed by tests/test_conformance.py and study/test_resume.py
def test_resumed_in_mid_run_it_is_the_same_run(found, tmp_path):
    """The checkpoint holds seed devices, offers, merges and broadcasts under way."""
    folder, _, summary = found
    with pytest.raises(Killed):
        planted(tmp_path, seed=1, progress=DieAfter(430))
    again = {**resume_run(tmp_path / "run"), "wall_seconds": 0}
    assert again == summary
    assert events(tmp_path) == events(folder)


# With privacy

MODEL = 4 * (64 * 8 + 8 + 8 * 10 + 10)  # bytes


def test_a_private_run_notes_that_devices_report_nothing(tmp_path):
    summary = run(
        tmp_path / "run",
        {"name": "echopfl", "every": 5, "ask": 2, "broadcast": "always"},
        privacy={"epsilon": 8.0},
    )
    (note,) = [note for note in summary["notes"] if "feedback" in note]
    assert "not covered by their privacy ledger" in note
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    arrivals = [line for line in lines if line["event"] == "arrival"]
    assert len(arrivals) == 60
    # Devices neither choose among models nor continue from a newer one; they get one offer.
    offers = Counter(
        line["device"] for line in lines if line["event"] == "dispatch" and line["bytes"] > MODEL
    )
    assert set(offers.values()) <= {1}
    sent = {line["task"]: line["version"] for line in lines if line["event"] == "dispatch"}
    assert all(line["sent"] == sent[line["task"]] for line in arrivals)
    assert summary["clusters"]["splits"] == 1  # the second seed


# With sub-models


@pytest.mark.parametrize("level", ["declared", "measured"])
def test_clusters_form_with_sub_models_too(tmp_path, level):
    summary = run(
        tmp_path / "run",
        {"name": "echopfl", "every": 5, "ask": 2, "gap": 0.1, "need": 0.05},
        submodels={"level": level},
        stop={"updates": 120},
    )
    assert summary["refused"] == 0
    assert summary["clusters"]["splits"] > 1
    assert summary["clusters"]["broadcasts"] > 0


def test_late_devices_in_flight_and_busy(tmp_path):
    for kind in ("in-flight", "busy"):
        summary = run(
            tmp_path / kind,
            {"name": "echopfl", "every": 5, "ask": 2},
            fleet={
                "devices": 10,
                "profile": "tiers",
                "late": {"kind": kind, "devices": 3, "delay": 5},
            },
            stop={"updates": 80},
        )
        assert summary["refused"] == 0
        assert summary["updates"] == 80
        assert summary["staleness"]["max"] > 0


def test_memory_does_not_grow_with_the_delay_of_a_device():
    """One device takes as long as 200 tasks of the others, with two local epochs."""
    profiles = [DeviceProfile(seconds_per_task=1.0)] * 4 + [DeviceProfile(seconds_per_task=200.0)]
    server = toy_server("echopfl", {**ALONE, "broadcast": "always"})
    run = ToyRun(server, Fleet(tuple(profiles), seed=0))
    run.until(virtual_seconds=199.5)
    passes = server.spec.local_epochs
    assert len(server.store.versions) <= (1 + passes) * len(server.open_tasks)

"""The totals of summary.json are added up from typed outcomes, not from log lines."""

import json

import pytest

import latecomer
from latecomer.core.outcomes import Outcome

RUNS = {
    "latecomer": {
        "strategy": {"name": "latecomer", "iterations": 3, "samples": 2},
        "fleet": {
            "devices": 10,
            "profile": "tiers",
            "crash": 0.1,
            "late": {"kind": "in-flight", "devices": 2, "delay": 3},
        },
    },
    "echopfl": {
        "strategy": {"name": "echopfl", "every": 5, "ask": 2, "broadcast": "always"},
        "fleet": {"devices": 10, "profile": "tiers"},
    },
    "private": {
        "strategy": {"name": "fedasync"},
        "fleet": {"devices": 10, "profile": "uniform"},
        "privacy": {"epsilon": 1.0, "where": "update", "budget": 1.7},  # four tasks of each device
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_no_number_depends_on_the_kind_of_an_outcome(name, tiny_tree, tmp_path, monkeypatch):
    config = {**tiny_tree, **RUNS[name], "stop": {"updates": 80}}
    before = summary_of(config, tmp_path / "before")
    for cls in Outcome.__subclasses__():
        monkeypatch.setattr(cls, "kind", f"renamed {cls.kind}")
    after = summary_of(config, tmp_path / "after")
    kinds = {json.loads(line)["event"] for line in (tmp_path / "after/events.jsonl").open()}
    assert {"renamed arrival", "renamed commit"} <= kinds
    assert not {"arrival", "commit"} & kinds
    assert after == before
    assert before["staleness"]["max"] > 0


def summary_of(config, folder):
    latecomer.run(config, out=folder)
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "wall_seconds": 0}

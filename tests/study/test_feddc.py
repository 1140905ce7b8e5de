"""FedDC end to end: what a run tells of its repairs, and what it keeps to itself."""

import json

import pytest

import latecomer

SCENARIO = {
    "data": {"partition": "one-class"},
    "fleet": {"devices": 20, "late": {"classes": [5], "devices": 20, "delay": 20}},
    "training": {"local_epochs": 5, "lr": 0.1, "batch_size": 100},
    "model": {"hidden": [32]},
    "stop": {"epochs": 60},
    "evaluate": {"every": 40},
}


def run(folder, name, changes=None, **options):
    tree = SCENARIO | {"strategy": {"name": name, **options}} | (changes or {})
    return latecomer.run(tree, out=folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("feddc")
    return {name: run(folder / name, name) for name in ("unstale", "semi-async", "feddc")}


def affected(result):
    late = result.metrics[result.metrics["virtual_seconds"] > 200]
    return late["accuracy_affected"].mean()


def test_the_late_class_is_heard(runs):
    assert affected(runs["feddc"]) > affected(runs["semi-async"]) + 0.2
    assert affected(runs["feddc"]) > affected(runs["unstale"]) - 0.15


def test_the_summary_counts_repairs(runs):
    repairs = runs["feddc"].summary["compensation"]
    lines = runs["feddc"].events.query("event == 'compensation'")
    assert repairs["count"] == len(lines) > 0
    assert repairs["seconds"] == pytest.approx(lines["seconds"].sum(), rel=1e-6)
    assert runs["semi-async"].summary["compensation"] is None


def test_estimates_are_judged_and_better(runs):
    judged = runs["feddc"].events.query("event == 'judgement'")
    assert len(judged)
    first = judged.iloc[0]
    assert first["error_estimate"] < first["error_stale"]


def test_no_estimate_leaves_the_server(runs):
    """Log lines hold numbers and names, never examples."""
    with (runs["feddc"].folder / "events.jsonl").open() as lines:
        for line in lines:
            event = json.loads(line)
            assert len(event.pop("spans", [])) in (0, 3)
            for value in event.values():
                assert isinstance(value, int | float | str | bool)


def test_away_devices_have_stand_ins(tmp_path):
    fleet = {"devices": 20, "late": {"classes": [5], "devices": 20, "delay": 8, "kind": "busy"}}
    plain = run(tmp_path / "plain", "feddc", {"fleet": fleet})
    spoken_for = run(tmp_path / "stand-ins", "feddc", {"fleet": fleet}, surrogates=True)
    assert affected(spoken_for) > affected(plain) + 0.2
    assert spoken_for.events["surrogates"].sum() > 0


def test_adam_is_warned_of(tmp_path):
    changes = {"training": {"optimizer": "adam", "lr": 0.001}, "stop": {"epochs": 1}}
    assert "Adam" in run(tmp_path / "adam", "feddc", changes).summary["notes"][-1]

"""FedDC end to end: the effect of compensation, its count and cost in the outputs."""

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


def late_class_accuracy(result):
    late = result.metrics[result.metrics["virtual_seconds"] > 200]
    return late["accuracy_affected"].mean()


def test_the_late_class_is_learned(runs):
    assert late_class_accuracy(runs["feddc"]) > late_class_accuracy(runs["semi-async"]) + 0.2
    assert late_class_accuracy(runs["feddc"]) > late_class_accuracy(runs["unstale"]) - 0.15


def test_the_summary_counts_compensations(runs):
    total = runs["feddc"].summary["compensation"]
    lines = runs["feddc"].events.query("event == 'compensation'")
    assert total["count"] == len(lines) > 0
    assert total["seconds"] == pytest.approx(lines["seconds"].sum(), rel=1e-6)
    assert runs["semi-async"].summary["compensation"] is None


def test_estimates_are_validated_and_better(runs):
    validated = runs["feddc"].events.query("event == 'validation'")
    assert len(validated)
    first = validated.iloc[0]
    assert first["error_estimate"] < first["error_stale"]


def test_no_estimate_leaves_the_server(runs):
    """Log lines hold numbers and names, never examples."""
    with (runs["feddc"].folder / "events.jsonl").open() as lines:
        for line in lines:
            event = json.loads(line)
            assert len(event.pop("spans", [])) in (0, 3)
            for value in event.values():
                assert isinstance(value, int | float | str | bool)


def test_absent_devices_have_surrogates(tmp_path):
    fleet = {"devices": 20, "late": {"classes": [5], "devices": 20, "delay": 8, "kind": "busy"}}
    plain = run(tmp_path / "plain", "feddc", {"fleet": fleet})
    result = run(tmp_path / "surrogates", "feddc", {"fleet": fleet}, surrogates=True)
    assert late_class_accuracy(result) > late_class_accuracy(plain) + 0.2
    assert result.events["surrogates"].sum() > 0


def test_a_note_warns_of_adam(tmp_path):
    changes = {"training": {"optimizer": "adam", "lr": 0.001}, "stop": {"epochs": 1}}
    assert "'adam'" in run(tmp_path / "adam", "feddc", changes).summary["notes"][-1]

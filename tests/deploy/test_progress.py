"""How far a run is, from files that are being written."""

import json

from latecomer.deploy.progress import RunReader
from latecomer.deploy.up import summary

EVENTS = [
    {"event": "introduction", "device": 0, "name": "kitchen"},
    {"event": "dispatch", "device": 0, "task": 0},
    {"event": "arrival", "device": 0, "staleness": 0},
    {"event": "commit", "version": 1},
    {"event": "arrival", "device": 0, "staleness": 3},
    {"event": "commit", "version": 2},
    {"event": "drop", "device": 0, "reason": "no disk"},
]


def lines(events):
    return "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)


def test_a_run_that_grows_is_read_on(tmp_path):
    reader = RunReader(tmp_path)
    assert reader.read().line() == "0 versions, 0 updates"
    log = tmp_path / "events.jsonl"
    text = lines(EVENTS)
    log.write_text(text[:-10])
    assert reader.read().lost == 0  # the last line is not whole yet
    log.write_text(text)
    (tmp_path / "metrics.csv").write_text("updates,version,accuracy\n1,1,0.5\n2,2,0.75\n")
    progress = reader.read()
    assert progress.line() == "2 versions, 2 updates, accuracy 0.750, 1 lost"
    assert progress.reason == "kitchen: no disk"
    assert progress.mean_staleness() == 1.5
    assert list(summary(progress, 12.0)) == [
        "finished in 12 s: 2 versions, 2 updates, accuracy 0.750, 1 lost",
        "staleness: mean 1.5, at most 3",
        "updates:   kitchen 2",
    ]


def test_a_log_that_was_cut_back_is_read_anew(tmp_path):
    reader, log = RunReader(tmp_path), tmp_path / "events.jsonl"
    log.write_text(lines(EVENTS))
    reader.read()
    log.write_text(lines(EVENTS[:4]))
    assert reader.read().line() == "1 versions, 1 updates"


def test_what_cannot_be_read_is_passed_over(tmp_path):
    (tmp_path / "events.jsonl").write_text("{\n" + lines(EVENTS[:4]))
    (tmp_path / "metrics.csv").write_text("updates\n1\n")
    progress = RunReader(tmp_path).read()
    assert progress.updates == 1
    assert progress.accuracy is None

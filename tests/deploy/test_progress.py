"""How far a run is, from files that are being written."""

import json

from latecomer.deploy.flower_log import FlowerProgress
from latecomer.deploy.progress import RunProgress
from latecomer.deploy.up import summary

EVENTS = [
    {"event": "introduction", "device": 0, "name": "kitchen", "width": 1.0},
    {"event": "dispatch", "device": 0, "task": 0, "lineage": "main", "bytes": 8},
    {"event": "arrival", "device": 0, "task": 0, "staleness": 0},
    {"event": "commit", "version": 1},
    {"event": "arrival", "device": 0, "task": 1, "staleness": 3},
    {"event": "commit", "version": 2},
    {"event": "drop", "device": 0, "task": 2, "reason": "no disk"},
]


def lines(events):
    return "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)


def test_a_run_that_grows_is_read_on(tmp_path):
    progress = RunProgress(tmp_path)
    progress.read()
    assert progress.line() == "0 versions, 0 updates"
    log = tmp_path / "events.jsonl"
    text = lines(EVENTS)
    log.write_text(text[:-10])
    progress.read()
    assert progress.history.failures == 0  # the last line is not whole yet
    log.write_text(text)
    (tmp_path / "metrics.csv").write_text("updates,version,accuracy\n1,1,0.5\n2,2,0.75\n")
    progress.read()
    assert progress.line() == "2 versions, 2 updates, accuracy 0.750, 1 lost"
    assert progress.history.failure == "kitchen: no disk"
    assert list(summary(progress, 12.0)) == [
        "finished in 12 s: 2 versions, 2 updates, accuracy 0.750, 1 lost",
        "staleness: mean 1.5, at most 3",
        "updates:   kitchen 2",
    ]


def test_a_log_that_was_cut_back_is_read_anew(tmp_path):
    progress, log = RunProgress(tmp_path), tmp_path / "events.jsonl"
    log.write_text(lines(EVENTS))
    progress.read()
    log.write_text(lines(EVENTS[:4]))
    progress.read()
    assert progress.line() == "1 versions, 1 updates"


def test_metrics_without_an_accuracy(tmp_path):
    (tmp_path / "events.jsonl").write_text(lines(EVENTS[:4]))
    (tmp_path / "metrics.csv").write_text("updates\n1\n")
    progress = RunProgress(tmp_path)
    progress.read()
    assert progress.updates == 1
    assert progress.score is None
    (tmp_path / "metrics.csv").write_text("updates,version,rmse\n1,1,12.5\n")
    progress.read()
    assert progress.line().endswith("RMSE 12.5")


def test_quarantines_and_roll_backs_are_shown(tmp_path):
    progress, log = RunProgress(tmp_path), tmp_path / "events.jsonl"
    refused = {"event": "refusal", "device": 0, "task": 1, "reason": "huge"}
    held = {"event": "quarantine", "device": 0, "until": 20, "reason": "refused repeatedly"}
    log.write_text(lines([*EVENTS[:3], refused, held]))
    progress.read()
    assert progress.line() == "0 versions, 1 updates, 1 lost, 1 in quarantine"
    back = {"event": "rollback", "version": 5, "to": 0, "reason": "most were refused"}
    log.write_text(lines([*EVENTS[:3], refused, held, back]))
    progress.read()
    assert progress.line() == "0 versions, 1 updates, 1 lost, rolled back 1 times"
    assert progress.history.failure == "the model was rolled back: most were refused"


FLOWER_LOG = """
INFO :      Initial global evaluation results: {'loss': 2.3, 'accuracy': 0.1}
INFO :      [ROUND 1/3]
INFO :      aggregate_train: Received 3 results and 0 failures
INFO :      	└──> Aggregated MetricRecord: {'train_loss': 1.5}
INFO :      aggregate_evaluate: Received 3 results and 0 failures
INFO :      	└──> Aggregated MetricRecord: {'eval_loss': 1.2e+00, 'eval_acc': 0.61}
INFO :      [ROUND 2/3]
INFO :      aggregate_train: Received 2 results and 1 failures
INFO :      	└──> Aggregated MetricRecord: {'train_loss': 1.1}
"""


def test_an_app_with_a_strategy_of_flowers_is_read_from_its_log(tmp_path):
    progress = RunProgress(tmp_path)
    progress.flower = FlowerProgress.of(FLOWER_LOG)
    assert progress.line() == "round 2 of 3, 2 versions, 5 updates, eval_acc 0.610, 1 lost"
    assert next(iter(summary(progress, 7.0))) == f"finished in 7 s: {progress.line()}"
    (tmp_path / "events.jsonl").write_text("")  # a server of Latecomer's has begun
    assert progress.line() == "0 versions, 0 updates"


def test_metrics_of_devices_stand_in_for_those_of_the_server(tmp_path):
    (tmp_path / "events.jsonl").write_text(lines(EVENTS[:4]))
    columns = "updates,version,client_eval_loss,client_eval_acc,client_nodes,train_loss"
    rows = "0,0,,,,\n3,3,0.5,0.75,3,1.2\n6,6,,,,1.1\n"
    (tmp_path / "metrics.csv").write_text(f"{columns}\n{rows}")
    progress = RunProgress(tmp_path)
    progress.read()
    assert progress.line() == "1 versions, 1 updates, client_eval_acc 0.75"

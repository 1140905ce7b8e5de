"""Panels of the report from hand-made log lines with known results."""

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latecomer.errors import BadInput
from latecomer.study.view.clusters import clusters
from latecomer.study.view.compensation import compensation
from latecomer.study.view.devices import device_table, scores_of_all, widths
from latecomer.study.view.history import Follower, History, read_history
from latecomer.study.view.panels import MAX_POINTS, Lanes, Panel, clock_for, short, thinned, to_json
from latecomer.study.view.privacy import privacy
from latecomer.study.view.run_document import budget_of
from latecomer.study.view.staleness import staleness, staleness_of_all
from latecomer.study.view.timeline import Fleet, spans_of, state_shares, timeline
from latecomer.study.view.traffic import traffic

SECONDS = clock_for(1.0)
FLEET = Fleet(2, frozenset(), {})


def line(time: float, event: str, **fields: Any) -> bytes:
    return json.dumps({"time": time, "event": event, **fields}).encode()


def sent(time: float, device: int, task: int, lineage: str = "main") -> bytes:
    return line(time, "dispatch", device=device, task=task, lineage=lineage, version=0, bytes=100)


def back(time: float, device: int, task: int, **more: Any) -> bytes:
    fields = {"lineage": "main", "staleness": 0, "weight": 1.0, "bytes": 50, **more}
    return line(time, "arrival", device=device, task=task, sent=0, version=1, **fields)


def history_of(*lines: bytes) -> History:
    history = History()
    history.feed(lines)
    return history


def lanes_of(panel: Panel | None) -> Lanes:
    assert panel is not None
    found = panel.views[0].lanes
    assert found is not None
    return found


def spans(lanes: Lanes) -> list[tuple[str, str, float, float]]:
    rows = []
    for lane, label in enumerate(lanes.labels):
        for k in range(lanes.offsets[lane], lanes.offsets[lane + 1]):
            state = lanes.states[lanes.state[k]].name
            rows.append((label, state, float(lanes.start[k]), float(lanes.end[k])))
    return rows


def test_a_task_is_download_training_upload_and_what_is_late() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        back(6, 0, 0, spans=[1, 3, 2]),
        back(10, 1, 1, spans=[1, 3, 2]),
    )
    panel = timeline(history, Fleet(2, frozenset({1}), {}), SECONDS)
    assert spans(lanes_of(panel)) == [
        ("1", "download", 0, 1),
        ("1", "training", 1, 4),
        ("1", "upload", 4, 6),
        ("1", "late upload in flight", 6, 10),
        ("0", "download", 0, 1),
        ("0", "training", 1, 4),
        ("0", "upload", 4, 6),
    ]
    assert list(lanes_of(panel).late) == [True, False]


def test_lost_tasks_open_ones_and_logs_without_spans() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        sent(0, 2, 2),
        line(4, "drop", device=0, task=0, reason="the device was lost in mid-task"),
        back(8, 1, 1),
    )
    assert spans(lanes_of(timeline(history, FLEET, SECONDS))) == [
        ("0", "lost", 0, 4),
        ("1", "working", 0, 8),
        ("2", "no reply yet", 0, 8),
    ]


def test_devices_are_offline_outside_their_windows() -> None:
    history = history_of(sent(0, 0, 0), back(20, 0, 0, spans=[0, 20, 0]))
    fleet = Fleet(2, frozenset(), {1: (10.0, ((2.0, 5.0),))})
    assert spans(lanes_of(timeline(history, fleet, SECONDS)))[1:] == [
        ("1", "offline", 0, 2),
        ("1", "offline", 5, 12),
        ("1", "offline", 15, 20),
    ]
    shares = state_shares(spans_of(history, fleet), [0, 1], 20.0)
    assert shares[:, 1].mean() == pytest.approx(0.5)  # one of two trains all the time
    assert shares[:, 5].mean() == pytest.approx(0.5 * 14 / 20, abs=0.01)


def test_thousands_of_devices_keep_all_late_lanes_and_a_sample() -> None:
    lines = [sent(0, d, d) for d in range(400)] + [
        back(2, d, d, spans=[0, 2, 0]) for d in range(400)
    ]
    panel = timeline(history_of(*lines), Fleet(400, frozenset({7, 399}), {}), SECONDS, 100)
    lanes = lanes_of(panel)
    assert lanes.labels[:2] == ["7", "399"]
    assert 50 < len(lanes.labels) <= 101
    assert panel is not None
    assert "of 400 devices are shown" in panel.views[0].note


def test_a_timeline_is_packed() -> None:
    history = history_of(sent(0, 0, 0), back(6, 0, 0, spans=[1, 3, 2]))
    packed = to_json(lanes_of(timeline(history, FLEET, SECONDS)))
    starts = np.frombuffer(b64decode(packed["start"]), dtype="<f4")
    assert starts.tolist() == [0, 1, 4]


def test_nothing_to_show_is_no_panel() -> None:
    empty = History()
    for made in (
        timeline(empty, FLEET, SECONDS),
        staleness(empty),
        traffic(empty, SECONDS),
        clusters(empty, SECONDS),
        compensation(empty, SECONDS),
        privacy(empty, 1.0, SECONDS),
        widths(empty, FLEET),
        device_table(empty, FLEET, None, 0.0, True),
        staleness_of_all({"a": empty}),
        scores_of_all({"a": []}),
    ):
        assert made is None


def test_privacy_by_device_and_over_time() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        back(1, 0, 0, epsilon=0.5),
        back(2, 1, 1, epsilon=1.0),
        sent(2, 0, 2),
        back(3, 0, 2, epsilon=2.0),
        line(3, "retire", device=0, epsilon=2.0, reason="its budget is spent"),
    )
    panel = privacy(history, 2.0, SECONDS)
    assert panel is not None
    active, spent = panel.views[0].series
    assert (active.x, active.y) == ([2], [1.0])
    assert (spent.x, spent.y) == ([1], [2.0])
    assert panel.views[0].marks[0].at == 2.0
    mean, largest = panel.views[1].series
    assert list(mean.y) == [0.5, 0.75, 1.5, 1.5]
    assert list(largest.y) == [0.5, 1.0, 2.0, 2.0]
    table = device_table(history, FLEET, None, 2.0, False)
    assert table is not None
    assert table.columns["state"] == ["budget spent", "idle"]
    assert table.columns["budget left"] == [0.0, 1.0]


def test_clusters_over_time() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        line(4, "split", lineage="main", into="c1", devices=[1]),
        back(4, 1, 1, lineage="c1"),
        sent(5, 1, 2, lineage="c1"),
        line(6, "broadcast", lineage="c1"),
        line(8, "merge", lineage="c1", into="main"),
        sent(8, 1, 3),
    )
    panel = clusters(history, SECONDS)
    assert panel is not None
    members, by_device = panel.views
    assert [m.label for m in members.marks] == ["split main, c1", "broadcast c1", "merge c1, main"]
    by_name = {s.name: list(zip(s.x, s.y, strict=True)) for s in members.series}
    assert by_name["main"] == [(0, 2), (4, 1), (8, 2), (8, 2)]
    assert by_name["c1"] == [(0, 0), (4, 1), (8, 0), (8, 0)]
    assert members.note == "Total: 1 split, 1 merge, 1 broadcast."
    assert by_device.lanes is not None
    assert spans(by_device.lanes)[1:] == [
        ("1", "main", 0, 4),
        ("1", "c1", 4, 8),
        ("1", "main", 8, 8),
    ]


def test_a_merge_takes_its_members_along_and_a_broadcast_is_traffic() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1, lineage="c1"),
        line(2, "broadcast", lineage="c1", version=3, devices=1, bytes=700),
        line(4, "merge", lineage="c1", into="main"),
        sent(9, 0, 2),
    )
    assert history.cluster_of == {0: "main", 1: "main"}
    assert history.moves[-1] == (4, 1, "main")
    assert sum(history.down[1]) == 1000


def test_a_split_takes_its_members_at_once() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        line(3, "split", lineage="main", into="c1", devices=[1]),
    )
    assert history.cluster_of == {0: "main", 1: "c1"}
    assert history.moves[-1] == (3, 1, "c1")


def test_a_ledger_never_goes_back_and_a_refused_update_was_released_too() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        back(1, 0, 0, epsilon=2.0),
        line(2, "refusal", device=1, task=1, reason="not finite", epsilon=0.7),
        back(3, 0, 0, epsilon=1.0),  # overtaken on its way
    )
    assert history.spent == {0: 2.0, 1: 0.7}


@pytest.mark.parametrize(
    ("privacy", "budget"),
    [
        ({"epsilon": 5.0, "mode": "per-step", "budget": 0.0}, 0.0),  # of each single release
        ({"epsilon": 5.0, "mode": "whole-run", "budget": 0.0}, 5.0),
        ({"epsilon": 5.0, "mode": "whole-run", "budget": 3.0}, 3.0),
        ({"epsilon": 5.0, "mode": "per-step", "budget": 30.0}, 30.0),
        ({}, 0.0),
    ],
)
def test_the_budget_is_that_of_the_whole_run(privacy: dict[str, Any], budget: float) -> None:
    assert budget_of({"privacy": privacy}) == budget


def test_a_hundred_models_share_eight_colours() -> None:
    lines = [sent(0, d, d, lineage=f"device-{d}") for d in range(100)]
    panel = clusters(history_of(*lines, sent(9, 0, 100, lineage="device-0")), SECONDS)
    assert panel is not None
    assert len(panel.views[0].series) == 8
    assert panel.views[0].series[-1].name == "others"
    assert panel.views[0].series[-1].y[-1] == 93


def test_compensation_errors_and_switch_off() -> None:
    compensated = {"device": 0, "task": 0, "lineage": "main", "staleness": 9, "weight": 1.0}
    validated = {"device": 0, "task": 1, "lineage": "main", "gap": 2}
    history = history_of(
        line(1, "compensation", **compensated, gamma=1.0, seconds=0.5),
        line(2, "compensation", **compensated, gamma=0.0, seconds=0.25),
        line(3, "validation", **validated, error_estimate=0.1, error_stale=0.4),
        line(4, "validation", **validated, error_estimate=None, error_stale=0.4),
        line(5, "switch", lineage="main", version=7, error_estimate=0.5, error_stale=0.4),
    )
    panel = compensation(history, SECONDS)
    assert panel is not None
    count, seconds, error = panel.views
    assert list(count.series[0].y) == [1, 1]
    assert list(seconds.series[0].y) == [0.5, 0.75]
    assert [list(s.y) for s in error.series] == [[0.1], [0.4]]
    assert [m.at for m in count.marks] == [5]


def test_widths_of_submodels() -> None:
    history = history_of(
        sent(0, 0, 0),
        sent(0, 1, 1),
        sent(0, 2, 2),
        line(0, "level", device=1, width=0.5),
        line(1, "level", device=2, width=0.5),
        line(2, "level", device=2, width=0.25),
    )
    panel = widths(history, FLEET)
    assert panel is not None
    bars = panel.views[0].series[0]
    assert dict(zip(bars.x, bars.y, strict=True)) == {"0.25": 1, "0.5": 1, "1": 1}


def test_widths_that_devices_declare_are_in_no_event() -> None:
    history = history_of(sent(0, 0, 0), sent(0, 1, 1), line(1, "level", device=1, width=0.25))
    fleet = Fleet(2, frozenset(), {}, {0: 0.75, 1: 0.5})
    panel = widths(history, fleet)
    assert panel is not None
    assert list(panel.views[0].series[0].x) == ["0.25", "0.75"]
    table = device_table(history, fleet, None, 0.0, False)
    assert table is not None
    assert table.columns["width"] == [0.75, 0.25]


def test_staleness_is_binned_and_weights_have_their_range() -> None:
    lines = [sent(0, 0, 0)]
    for k in range(300):
        lines += [sent(k, 0, k), back(k + 1, 0, k, staleness=k, weight=1 / (1 + k))]
    panel = staleness(history_of(*lines))
    assert panel is not None
    bars, weights = (view.series[0] for view in panel.views)
    assert len(bars.x) == 60
    assert sum(bars.y) == 300
    assert weights.high is not None
    assert weights.high[0] == 1.0
    assert weights.y[0] == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]))


def test_traffic_adds_up_and_names_its_peak() -> None:
    history = history_of(sent(0, 0, 0), sent(5, 1, 1), back(10, 0, 0))
    panel = traffic(history, SECONDS)
    assert panel is not None
    up, down = panel.views[0].series
    assert (up.y[-1], down.y[-1]) == (50, 200)
    assert "Peaks: upload 0.6 kB/s, download 1.2 kB/s." in panel.views[1].note


def test_devices_of_a_comparison_are_sorted_over_all_seeds() -> None:
    tables = {"a": [pd.DataFrame({"accuracy": [0.5, None]}), pd.DataFrame({"accuracy": [1.0]})]}
    panel = scores_of_all(tables)
    assert panel is not None
    assert (panel.views[0].series[0].y[0], panel.views[0].series[0].y[-1]) == (0.5, 1.0)


def test_numbers_are_short_and_curves_are_thin() -> None:
    assert [short(v) for v in (0.123456789, 3.0, float("nan"), None, "a", 12345678.9)] == [
        0.12346,
        3,
        None,
        None,
        "a",
        12346000,
    ]
    (x,) = thinned(list(range(100_000)))
    assert len(x) <= MAX_POINTS
    assert (x[0], x[-1]) == (0, 99_999)


def test_a_log_is_followed_while_it_grows_and_when_it_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = sent(0, 0, 0) + b"\n"
    path.write_bytes(first + back(1, 0, 0)[:20])
    follower = Follower(path)
    assert follower.catch_up()
    assert not follower.catch_up()
    assert len(follower.history.tasks) == 0
    path.write_bytes(first + back(1, 0, 0) + b"\n" + sent(1, 0, 1) + b"\n")
    assert follower.catch_up()
    assert len(follower.history.tasks) == 1
    # A resumed run has truncated it and written other lines, beyond the position read.
    path.write_bytes(first + b"".join(sent(2, 5, k) + b"\n" for k in range(9)))
    assert follower.catch_up()
    assert len(follower.history.tasks) == 0
    assert follower.history.devices == {0, 5}


@pytest.mark.parametrize(
    "text", ["no json\n", "[]\n", '{"time":1}\n', '{"time":1,"event":"drop"}\n']
)
def test_a_log_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"events\.jsonl"):
        read_history(path)

"""metrics.csv of a deployed server, over several lives of it."""

from types import SimpleNamespace

import pytest

from latecomer.study.scores import Scores


def a_server(version):
    store = SimpleNamespace(commits=version)
    return SimpleNamespace(accepted=version, store=store, model=lambda: version / 10)


def rows(folder):
    return [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()[1:]]


def test_every_so_often_a_row_and_none_twice(tmp_path):
    scores = Scores(tmp_path / "run", lambda params: {"accuracy": params}, every=0.0)
    for version in (1, 2, 3):
        scores(a_server(version))
    assert scores.final(a_server(3))["accuracy"] == pytest.approx(0.3)
    assert [(row[1], row[3]) for row in rows(tmp_path / "run")] == [
        ("1", "0.1"),
        ("2", "0.2"),
        ("3", "0.3"),
    ]
    rare = Scores(tmp_path, lambda params: {"accuracy": params}, every=60.0)
    rare(a_server(1))
    rare(a_server(2))
    assert len(rows(tmp_path)) == 1


def test_a_resumed_run_writes_its_rows_anew(tmp_path):
    for versions in ((1, 2, 5), (3, 4)):
        scores = Scores(tmp_path, lambda params: {"accuracy": params}, every=0.0)
        for version in versions:
            scores(a_server(version))
    assert [row[1] for row in rows(tmp_path)] == ["1", "2", "3", "4"]


def test_a_damaged_table_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("nothing\nof,use\n")
    Scores(tmp_path, lambda params: {"accuracy": 0.5})(a_server(4))
    assert [row[1] for row in rows(tmp_path)] == ["4"]

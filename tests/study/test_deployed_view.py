"""Report and live page of a deployed run, whose log has events that simulations do not have."""

import json
from dataclasses import replace

import pytest

from fake_grid import FakeTransport, ToyNode
from latecomer.engines.deployment_loop import Timeouts
from latecomer.engines.virtual import Bounds
from latecomer.errors import BadInput
from latecomer.study.deployed import Deployment
from latecomer.study.report import document_of, write_report
from latecomer.study.results import load
from latecomer.study.view.history import read_history
from latecomer.study.watch.folders import is_run, runs_in
from latecomer.study.watch.run_documents import FollowedRun
from toy import toy_fleet, toy_server


class Odd(ToyNode):
    """A device of which every other update is refused."""

    def reply(self, honest):
        return replace(honest, fields={}) if len(self.asked) % 2 else honest


class Silent(ToyNode):
    def reply(self, honest):
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that was resumed once, with every kind of event of a deployment."""
    folder = tmp_path_factory.mktemp("deployed") / "run"
    nodes = {i: ToyNode(f"toy-{i}") for i in range(5)}
    nodes |= {1: Odd("toy-1"), 2: Silent("toy-2"), 7: lambda kind, payload: "it raised"}
    timeouts = Timeouts(overdue=8.0, back_off=2.0)
    for updates in (30, 60):
        server = toy_server("echopfl", {"broadcast": "always"})
        transport = FakeTransport(toy_fleet(), nodes)
        Deployment(server, transport, folder, timeouts=timeouts).run(Bounds(updates))
        nodes[17] = nodes.pop(4, nodes.get(17))
    return folder


def kinds(folder):
    return {json.loads(line)["event"] for line in (folder / "events.jsonl").open()}


def test_the_log_has_them_all(folder):
    assert kinds(folder) >= {"introduction", "return", "overdue", "undelivered", "resume",
                             "refusal", "drop", "broadcast", "arrival", "commit"}  # fmt: skip


def test_the_history_of_a_deployed_run(folder):
    history = read_history(folder / "events.jsonl")
    assert history.names == {i: f"toy-{i}" for i in range(5)}
    assert sum(history.updates.values()) == 60
    assert 2 in history.overdue
    assert all(device in history.devices for device in history.updates)


def test_a_report_is_written(folder):
    page = write_report(folder).read_text()
    assert "toy-3" in page
    document = document_of(folder)
    assert document.facts["client updates"] == "60"
    assert "(deployed)" in document.subtitle
    assert document.tables[0].columns["state"][2] == "overdue"
    assert "accuracy" not in document.facts
    (folder / "report.html").unlink()


@pytest.mark.parametrize("time", ["virtual_seconds", "wall_seconds"])
def test_with_evaluations_of_the_server_there_are_curves(folder, time):
    path = folder / "metrics.csv"
    path.write_text(f"updates,version,{time},accuracy\n10,10,5.0,0.5\n60,60,30.0,0.75\n")
    try:
        document = document_of(folder)
        assert document.facts["accuracy"] == "0.750"
        assert "learning" in [panel.id for panel in document.panels]
    finally:
        path.unlink()


def test_the_live_page_finds_and_follows_it(folder):
    assert is_run(folder)
    assert list(runs_in(folder.parent)) == ["run"]
    followed = FollowedRun("run", folder)
    followed.refresh()
    assert "waiting" not in json.loads(followed.document)
    assert followed.state() in ("running", "unfinished")


def test_an_empty_folder_is_still_no_run(tmp_path):
    with pytest.raises(BadInput, match="neither a run"):
        load(tmp_path)
    assert not is_run(tmp_path)

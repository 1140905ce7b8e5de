"""The live page: access control, responses, and runs that are paused and stopped."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from latecomer.errors import BadInput
from latecomer.study.results import read_json
from latecomer.study.watch.access import is_loopback
from latecomer.study.watch.command import watch
from latecomer.study.watch.folders import runs_in
from latecomer.study.watch.run_documents import FollowedRun, RunDocuments
from latecomer.study.watch.run_processes import RunProcesses

Start = Callable[..., tuple[Path, dict[str, Any]]]
SECRET = "not for the page"


@pytest.fixture(scope="module")
def runs(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and other files that the page must not serve."""
    root = tmp_path_factory.mktemp("watched") / "runs"
    shutil.copytree(start("evaluate.every=10")[0], root / "a")
    shutil.copytree(root / "a", root / "group" / "b")
    (root / "notes.txt").write_text(SECRET)
    (root / "a" / "private.txt").write_text(SECRET)
    (root.parent / "outside.txt").write_text(SECRET)
    shutil.copytree(root / "a", root.parent / "elsewhere")
    (root / "link").symlink_to(root.parent / "elsewhere")
    shutil.copytree(root / "a", root / "sly")
    (root / "sly" / "config.toml").unlink()
    (root / "sly" / "config.toml").symlink_to(root.parent / "outside.txt")
    return root


class Client:
    """Sends requests to a real server, with unmodified paths."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, host

    def __call__(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: str = ""
    ) -> tuple[int, dict[str, str], str]:
        asking = HTTPConnection("127.0.0.1", self.port, timeout=20)
        asking.request(method, path, body or None, {"host": self.host, **(headers or {})})
        answer = asking.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        text = answer.read().decode()
        asking.close()
        return answer.status, found, text


@contextmanager
def served(root: Path, token: str | None = None) -> Iterator[Client]:
    pytest.importorskip("fastapi", reason='the live page needs the extra "watch"')
    uvicorn = pytest.importorskip("uvicorn")
    from latecomer.study.watch.app import listening, live_app

    place = listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(live_app(root, token=token), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield Client(place.getsockname()[1])
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def client(runs: Path) -> Iterator[Client]:
    with served(runs) as client:
        yield client


def wait_for(what: Callable[[], bool], seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_runs_are_found_and_links_are_not_followed(runs: Path) -> None:
    assert set(runs_in(runs)) == {"a", "group/b"}
    assert set(runs_in(runs / "a")) == {"a"}


def test_the_page_and_its_files(client: Client) -> None:
    status, headers, _ = client("GET", "/")
    assert status == 200
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    for name in ("page.css", "page.js", "charts.js", "lanes.js", "live.js", "plotly-basic.min.js"):
        assert client("GET", f"/assets/{name}")[0] == 200
    found = json.loads(client("GET", "/api/runs")[2])
    assert [(run["name"], run["state"], run["actions"]) for run in found] == [
        ("a", "finished", []),
        ("group/b", "finished", []),
    ]


@pytest.mark.parametrize(
    "path",
    [
        "/notes.txt",
        "/a/private.txt",
        "/assets/../notes.txt",
        "/assets/..%2f..%2fnotes.txt",
        "/assets/%2e%2e/%2e%2e/outside.txt",
        "/assets/....//notes.txt",
        "/assets//etc/passwd",
        "/assets/plotly-LICENSE.txt",
        "/api/runs/../../outside.txt",
        "/openapi.json",
        "/docs",
    ],
)
def test_nothing_else_is_served(client: Client, path: str) -> None:
    status, headers, text = client("GET", path)
    assert status == 404
    assert SECRET not in text
    assert "default-src 'none'" in headers["content-security-policy"]


def test_a_stream_of_unknown_names_follows_nothing(runs: Path) -> None:
    documents = RunDocuments(runs)
    for name in ("../outside", "..", "/etc", "a/../a", "sly", "link", ""):
        assert documents.folder(name) is None
        assert documents.document(name) == (0, "")


def test_only_loopback_names_are_allowed(client: Client) -> None:
    for host, status in (
        ("localhost:8787", 200),
        ("[::1]:8787", 200),
        ("evil.example", 403),
        ("[", 403),
    ):
        assert client("GET", "/", {"host": host})[0] == status
    assert is_loopback("127.0.0.9")
    assert not is_loopback("0.0.0.0")


def test_other_sites_cannot_control_runs(client: Client) -> None:
    body, ours = json.dumps({"run": "a", "action": "stop"}), {"x-latecomer": "1"}
    assert client("POST", "/api/act", None, body)[0] == 403
    assert client("POST", "/api/act", {**ours, "origin": "http://evil.example"}, body)[0] == 403
    assert client("POST", "/api/act", {**ours, "origin": "http://["}, body)[0] == 403
    assert client("POST", "/api/act", ours, body)[2] == '{"done":false}'  # it is not ours to stop
    for bad in (
        "",
        "[]",
        '{"run":"a"}',
        '{"run":"../x","action":"stop"}',
        '{"run":"a","action":"x"}',
    ):
        assert client("POST", "/api/act", ours, bad)[0] in (400, 404)
    assert client("POST", "/api/act", ours, "[" * 9_000)[0] == 400  # deeper than JSON is parsed
    assert client("POST", "/api/act", ours, " " * 20_000 + body)[0] == 413


def test_beyond_loopback_a_token_is_needed(runs: Path) -> None:
    with served(runs, "s3cret") as client:
        for path in ("/", "/api/runs", "/api/stream?run=a", "/assets/page.js", "/?token=wrong"):
            assert client("GET", path)[0] == 403
        assert client("GET", "/", {"authorization": "Bearer s3cret"})[0] == 200
        status, headers, _ = client("GET", "/?token=s3cret")
        assert status == 303
        assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
        cookie = headers["set-cookie"].split(";")[0]
        assert client("GET", "/api/runs", {"cookie": cookie})[0] == 200
        assert client("GET", "/api/runs", {"cookie": "latecomer_token=x"})[0] == 403


def test_documents_are_streamed_while_there_are_viewers(runs: Path) -> None:
    pytest.importorskip("fastapi")
    from latecomer.study.watch.app import events

    documents = RunDocuments(runs)
    documents.start()

    async def first_two() -> list[str]:
        stream = events(documents, RunProcesses(), ["a"], lambda: False)
        found = [await anext(stream), await anext(stream)]
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    listed, document = asyncio.run(asyncio.wait_for(first_two(), 20))
    documents.stop()
    assert listed.startswith("event: runs\n")
    data = json.loads(document.split("data: ", 1)[1])
    assert data["name"] == "a"
    assert data["document"]["title"] == "fedasync on digits"
    assert +documents.viewers == {}


def test_a_growing_run_is_followed(runs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("latecomer.study.watch.run_documents.EVERY_SECONDS", 0.0)
    monkeypatch.setattr("latecomer.study.watch.run_documents.DUTY", 1e9)
    folder = tmp_path / "grows"
    folder.mkdir()
    for name in ("config.toml", "fleet.json"):
        shutil.copy(runs / "a" / name, folder / name)
    run = FollowedRun("grows", folder)
    run.refresh()
    assert "waiting" in json.loads(run.document)
    events = (runs / "a" / "events.jsonl").read_bytes().splitlines(keepends=True)
    metrics = (runs / "a" / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(metrics[:3]))
    (folder / "events.jsonl").write_bytes(b"".join(events[:80]) + events[80][:9])
    run.refresh()
    before = json.loads(run.document)
    assert run.state() == "running"
    (folder / "metrics.csv").write_text("".join(metrics))
    (folder / "events.jsonl").write_bytes(b"".join(events))
    run.refresh()
    after = json.loads(run.document)

    def points(document: dict[str, Any]) -> int:
        return len(document["panels"][0]["views"][0]["series"][0]["x"])

    assert points(before) == 2 < points(after) == 7
    version = run.version
    run.refresh()
    assert run.version == version  # nothing new, nothing done


@pytest.mark.slow
def test_a_run_is_paused_continued_and_gives_the_same_model(tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(
        "[fleet]\ndevices=10\n[model]\nhidden=[8]\n[stop]\nupdates=4000\n[evaluate]\nevery=5\n"
        '[engine]\nkernel="plain"\n'
    )
    processes, one, two = RunProcesses(), tmp_path / "one", tmp_path / "two"
    processes.start(config, one, [])
    wait_for(
        lambda: (
            (one / "metrics.csv").is_file() and one.joinpath("metrics.csv").stat().st_size > 2000
        )
    )
    assert processes.state(one) == "running"
    assert processes.pause(one)
    wait_for(lambda: processes.state(one) == "paused")
    assert not (one / "summary.json").exists()
    assert processes.resume(one)
    wait_for(lambda: processes.state(one) is None)
    processes.start(config, two, [])
    wait_for(lambda: processes.state(two) is None)
    hashes = {read_json(folder / "summary.json")["model_hash"] for folder in (one, two)}
    assert len(hashes) == 1


@pytest.mark.slow
def test_a_run_is_stopped_and_a_failed_one_has_a_reason(tmp_path: Path) -> None:
    config = tmp_path / "long.toml"
    config.write_text('[stop]\nupdates=1000000\n[engine]\nkernel="plain"\n')
    processes = RunProcesses()
    processes.start(config, tmp_path / "long", [])
    processes.start(config, tmp_path / "bad", ["training.lr=-1"])
    wait_for(lambda: (tmp_path / "long" / "metrics.csv").is_file())
    assert processes.stop(tmp_path / "long")
    wait_for(lambda: processes.state(tmp_path / "long") == "stopped")
    assert not processes.resume(tmp_path / "long")
    wait_for(lambda: processes.state(tmp_path / "bad") == "failed")
    wait_for(lambda: "training.lr" in processes.reason(tmp_path / "bad"))
    assert processes.stop_all() == []


def test_bad_usage_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="--start"):
        watch(tmp_path, "127.0.0.1", 0, [], ["seed=2"], print)
    with pytest.raises(BadInput, match="no such folder"):
        watch(tmp_path / "none", "127.0.0.1", 0, [], [], print)
    monkeypatch.setattr("latecomer.study.watch.command.find_spec", lambda name: "there")
    (tmp_path / "some.toml").write_text("")
    (tmp_path / "config.toml").write_text("")
    for folder, problem in (
        (tmp_path, "is the folder of a run"),
        (tmp_path / "some.toml", "written"),
    ):
        with pytest.raises(BadInput, match=problem):
            watch(folder, "127.0.0.1", 0, [tmp_path / "some.toml"], [], print)
    monkeypatch.setattr("latecomer.study.watch.command.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install \"latecomer\[watch\]\""):
        watch(tmp_path, "127.0.0.1", 0, [], [], print)

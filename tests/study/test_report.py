"""Reports from the files of finished and unfinished runs; they load nothing."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latecomer.errors import BadInput
from latecomer.study.compare import compare
from latecomer.study.config import Config, Tree, merged
from latecomer.study.report import write_report
from latecomer.study.results import Result
from latecomer.study.runner import Silent, start_run

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(start: Start) -> Path:
    return start("evaluate.every=10", "fleet.late.classes=[5]", "fleet.late.delay=1")[0]


def page_of(folder: Path) -> str:
    assert write_report(folder) == folder / "report.html"
    return (folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    """The document embedded in the page."""
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', page, re.S)
    assert found
    return dict(json.loads(found[1]))


def panel(page: str, name: str) -> dict[str, Any]:
    return next(p for p in data_of(page)["panels"] if p["id"] == name)


def test_a_report_holds_the_curves(run: Path) -> None:
    page = page_of(run)
    metrics = Result(run).metrics
    over_time, over_updates, loss = panel(page, "learning")["views"]
    assert [s["name"] for s in over_time["series"]] == [
        "accuracy",
        "balanced accuracy",
        "macro-F1",
        "late-class accuracy",
    ]
    assert over_updates["series"][0]["x"] == metrics["updates"].tolist()
    assert over_time["series"][0]["y"] == pytest.approx(metrics["accuracy"].tolist(), abs=1e-5)
    assert loss["series"][0]["y"] == pytest.approx(metrics["loss"].tolist(), rel=1e-4)


def test_a_report_has_the_panels_of_a_run(run: Path) -> None:
    found = data_of(page_of(run))
    assert found["title"] == "fedasync on digits"
    assert ["client updates", "60"] in found["facts"]
    ids = [p["id"] for p in found["panels"]]
    assert ids == ["learning", "classes", "timeline", "staleness", "traffic", "devices"]
    assert [t["id"] for t in found["tables"]] == ["device-table"]
    texts = dict(found["texts"])
    assert "seed = 1" in texts["Config"]
    assert "latecomer run config.toml" in texts["Command to reproduce"]
    classes = panel(page_of(run), "classes")["views"][0]["series"]
    assert classes[1]["x"] == ["5 (late class)"]
    late = [s for s in panel(page_of(run), "devices")["views"][0]["series"] if "late" in s["name"]]
    assert len(late[0]["x"]) == len(Result(run).summary["late_devices"])


def test_no_panel_and_no_view_is_empty(run: Path) -> None:
    for each in data_of(page_of(run))["panels"]:
        assert each["views"]
        for view in each["views"]:
            assert view.get("lanes") or all(
                s["x"] and len(s["x"]) == len(s["y"]) for s in view["series"]
            )


def test_a_report_loads_nothing_from_elsewhere(run: Path) -> None:
    page = page_of(run)
    assert 1_000_000 < len(page) < 3_000_000  # the chart library lies in it, once
    assert page.count("plotly.js (basic - minified)") == 1
    assert "default-src 'none'" in page
    for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page):
        assert "src=" not in tag
        assert "href=" not in tag


def test_a_report_is_rewritten_from_its_files(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoint", ignore_errors=True)
    (copy / "model.safetensors").unlink()
    (copy / "report.html").write_text("old")
    assert "fedasync on digits" in page_of(copy)
    assert not list(copy.glob("*.new"))


def test_names_are_text_and_not_markup(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    shutil.copytree(run, folder)
    (folder / "config.toml").write_text(f'path = "{EVIL}"\n</pre><script>alert(2)</script>')
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(summary.replace('"fedasync"', f'"{EVIL}"'))
    page = page_of(folder)
    assert EVIL not in page
    assert "alert(2)</script>" not in page
    assert "&lt;img src=x onerror=alert(1)&gt; on digits" in page
    assert data_of(page)["title"] == f"{EVIL} on digits"


class Stop(Silent):
    """Ends a run in the middle, without a summary."""

    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= 30:
            raise InterruptedRun


class InterruptedRun(BaseException):
    pass


@pytest.fixture
def unfinished(tiny: MakeConfig, tmp_path: Path) -> Path:
    with pytest.raises(InterruptedRun):
        start_run(tiny("evaluate.every=10"), tmp_path / "run", Stop())
    assert not (tmp_path / "run" / "summary.json").exists()
    return tmp_path / "run"


def test_an_unfinished_run_has_a_report(unfinished: Path) -> None:
    page = page_of(unfinished)
    assert ["state", "not finished"] in data_of(page)["facts"]
    last = panel(page, "learning")["views"][0]["series"][0]["y"][-1]
    assert last == pytest.approx(Result(unfinished).metrics["accuracy"].iloc[-1], abs=1e-5)


def test_a_line_that_is_being_written_is_left_out(unfinished: Path) -> None:
    whole = len(Result(unfinished).events)
    with (unfinished / "events.jsonl").open("a") as file:
        file.write('{"time":12.0,"event":"arri')
    assert len(Result(unfinished).events) == whole
    assert "fedasync on digits" in page_of(unfinished)


def test_a_run_that_has_just_begun_has_a_report(unfinished: Path) -> None:
    (unfinished / "events.jsonl").write_text("")
    lines = (unfinished / "metrics.csv").read_text().splitlines()
    (unfinished / "metrics.csv").write_text("\n".join(lines[:2]) + "\n")
    assert [p["id"] for p in data_of(page_of(unfinished))["panels"]] == ["learning", "classes"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", ""),
        ("metrics.csv", "a,b\n1,2\n"),
        ("metrics.csv", "\x00\xff"),
        ("events.jsonl", "no json\n"),
        ("events.jsonl", None),
        ("config.toml", None),
        ("summary.json", "{"),
        ("devices.csv", "a,b\n1,2\n"),
        ("fleet.json", '{"late": 3}'),
    ],
)
def test_files_that_are_no_run_are_refused(
    run: Path, tmp_path: Path, name: str, content: str | None
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "report.html").unlink(missing_ok=True)
    if content is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(content)
    with pytest.raises(BadInput, match=name):
        write_report(copy)
    assert not (copy / "report.html").exists()


@pytest.fixture(scope="module")
def comparison(tiny_tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    evil = {"strategy": {"name": "fedasync"}}
    tree = merged(tiny_tree, {"stop": {"updates": 20}, "compare": {EVIL: evil}})
    folder = tmp_path_factory.mktemp("report") / "both"
    compare(tree, ["fedavg", EVIL], [1, 2], folder)
    return folder


def test_the_report_of_a_comparison(comparison: Path) -> None:
    page = page_of(comparison)
    found = data_of(page)
    assert found["title"] == "Latecomer comparison"
    assert found["tables"][0]["columns"][0] == ["strategy", ["fedavg", EVIL]]
    ids = [p["id"] for p in found["panels"]]
    assert ids[:3] == ["learning", "outcomes", "classes"]
    assert {"devices", "fleet-use", "timeline", "staleness", "traffic"} <= set(ids)
    views = [v["name"] for v in panel(page, "timeline")["views"]]
    assert views[0] == "fedavg: by device"
    assert f"{EVIL}: by device" in views
    command = dict(found["texts"])["Command to reproduce"]
    assert "latecomer compare compare.toml" in command
    assert "--seeds 1,2" in command
    assert EVIL not in page


def test_the_band_of_a_comparison_is_its_range(comparison: Path) -> None:
    curve = panel(page_of(comparison), "learning")["views"][1]["series"][0]
    last = [
        Result(comparison / f"fedavg-seed{seed}").metrics["accuracy"].iloc[-1] for seed in (1, 2)
    ]
    ends = [curve[key][-1] for key in ("low", "y", "high")]
    assert ends == pytest.approx([min(last), sum(last) / 2, max(last)], abs=1e-5)


def test_a_damaged_comparison_is_refused(comparison: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    (copy / "compare.csv").write_text("")
    with pytest.raises(BadInput, match=r"compare\.csv"):
        write_report(copy)
    (copy / "compare.json").write_text("[]")
    with pytest.raises(BadInput, match=r"compare\.json"):
        write_report(copy)

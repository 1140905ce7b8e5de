"""Reports: from files alone, for what is finished and what is not, safe to open."""

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


def charts(page: str) -> str:
    """The page without the chart library: the longest script is the library."""
    library = max(re.findall(r"<script\b.*?</script>", page, flags=re.DOTALL), key=len)
    return page.replace(library, "")


def test_a_report_holds_the_curves(run: Path) -> None:
    page = page_of(run)
    drawn = charts(page)
    metrics = Result(run).metrics
    for value in metrics["accuracy"].tolist():
        assert repr(value) in drawn
    assert drawn.count("Plotly.newPlot") == 3
    for word in ("balanced accuracy", "macro-F1", "affected classes", "Staleness", "seed = 1"):
        assert word in drawn
    assert "fedasync on digits" in drawn
    assert "60</td>" in drawn


def test_a_report_loads_nothing_from_elsewhere(run: Path) -> None:
    page = page_of(run)
    assert len(page) > 1_000_000  # the chart library lies in it
    for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", charts(page)):
        assert "src=" not in tag
        assert "href=" not in tag


def test_a_report_is_rewritten_from_files_alone(run: Path, tmp_path: Path) -> None:
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
    assert "Latecomer run" in page
    assert repr(float(Result(unfinished).metrics["accuracy"].iloc[-1])) in charts(page)


def test_a_line_that_is_being_written_is_left_out(unfinished: Path) -> None:
    whole = len(Result(unfinished).events)
    with (unfinished / "events.jsonl").open("a") as file:
        file.write('{"time":12.0,"event":"arri')
    assert len(Result(unfinished).events) == whole
    assert "Latecomer run" in page_of(unfinished)


def test_a_run_that_has_just_begun_has_a_report(unfinished: Path) -> None:
    (unfinished / "events.jsonl").write_text("")
    lines = (unfinished / "metrics.csv").read_text().splitlines()
    (unfinished / "metrics.csv").write_text("\n".join(lines[:2]) + "\n")
    assert "Latecomer run" in page_of(unfinished)


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
    assert "Latecomer comparison" in page
    assert "<td>fedavg</td>" in page
    assert charts(page).count("Plotly.newPlot") == 3
    assert EVIL not in page
    assert "<td>&lt;img src=x onerror=alert(1)&gt;</td>" in page


def test_the_band_of_a_comparison_is_its_range(comparison: Path) -> None:
    page = charts(page_of(comparison))
    last = [
        Result(comparison / f"fedavg-seed{seed}").metrics["accuracy"].iloc[-1] for seed in (1, 2)
    ]
    for value in (*last, sum(last) / 2):
        assert repr(float(value)) in page


def test_a_damaged_comparison_is_refused(comparison: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(comparison, copy)
    (copy / "compare.csv").write_text("")
    with pytest.raises(BadInput, match=r"compare\.csv"):
        write_report(copy)
    (copy / "compare.json").write_text("[]")
    with pytest.raises(BadInput, match=r"compare\.json"):
        write_report(copy)

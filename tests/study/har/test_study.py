"""The whole study on six subjects, from Python and from the command line."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import tomli_w

from latecomer import cli
from latecomer.errors import BadInput
from latecomer.study.config import Tree, merged
from latecomer.study.experiment import Experiment
from latecomer.study.har.plan import make_plan
from latecomer.study.har.study import HarStudy, run_har


@pytest.fixture(scope="module")
def study(scenario: Tree, tmp_path_factory: pytest.TempPathFactory) -> HarStudy:
    return run_har(scenario, [1, 2], tmp_path_factory.mktemp("study") / "har")


def test_one_row_per_run(study: HarStudy) -> None:
    table = pd.read_csv(study.folder / "results.csv", keep_default_na=False)
    assert len(table) == 2 * 16
    assert not table.duplicated(["paradigm", "factor", "value", "seed"]).any()
    assert set(table["updates"]) == {36, 30}
    assert {"f1_sit", "f1_walk", "f1_run", "f1_rarest", "client_macro_f1_worst"} <= set(table)
    assert (table["f1_rarest"].astype(float) == table["f1_run"].astype(float)).all()


def test_identical_splits_in_all_variants(scenario: Tree) -> None:
    """Every example is in the same part in all variants, except for the factor test."""
    plan = make_plan(scenario)
    made = [
        Experiment(variant.cell(2).config()).federation.clients
        for variant in plan.variants
        if variant.factor != "test"
    ]
    first = made[0]
    for clients in made[1:]:
        for one, other in zip(first, clients, strict=True):
            assert set(one.train_rows.tolist()) == set(other.train_rows.tolist())
            assert one.validation_rows.tolist() == other.validation_rows.tolist()
            assert one.test_rows.tolist() == other.test_rows.tolist()


def test_equal_updates(study: HarStudy) -> None:
    assert study.equal.groupby("seed")["updates"].nunique().eq(1).all()
    times = study.equal.groupby("paradigm")["virtual_seconds"].mean()
    assert times["asynchronous"] < times["synchronous"]


def test_the_findings(study: HarStudy) -> None:
    text = (study.folder / "findings.md").read_text()
    for heading in ("Paradigms at equal client updates", "Effects of decisions"):
        assert f"## {heading}" in text
    results = ("agree", "disagree", "inconclusive")
    assert sum(text.count(f"| **{result}** |") for result in results) == 6
    assert "of the synchronous macro-F1, in 1/" in text
    assert "missing values" in text


def test_the_report_needs_no_network(study: HarStudy) -> None:
    page = (study.folder / "report.html").read_text()
    assert "Label distribution per device" in page
    assert "Feature skew" in page
    assert 'src="http' not in page


def test_the_page_has_the_tables_of_the_findings(study: HarStudy) -> None:
    page = (study.folder / "report.html").read_text()
    found = re.search(r'id="document">(.*?)</script>', page)
    assert found is not None
    document = json.loads(found[1])
    by_title = {table["title"]: dict(table["columns"]) for table in document["tables"]}
    ((_, text),) = document["texts"]
    takeaways = by_title["Comparison with the paper"]
    assert list(takeaways["no."]) == list("123456")
    assert set(takeaways["result"]) <= {"agree", "disagree", "inconclusive"}
    numbers = takeaways["numbers (macro-F1 unless stated)"]
    assert "std of macro-F1 over seeds" in numbers[0]
    assert "of the variance within a class" in numbers[3]
    assert by_title["Tables"]["paradigm"][0] == "synchronous"
    assert "| " not in text


def test_the_same_again_runs_nothing(study: HarStudy, scenario: Tree) -> None:
    runs = sorted((study.folder / "runs").glob("*/summary.json"))
    before = [run.stat().st_mtime_ns for run in runs]
    text = (study.folder / "findings.md").read_text()
    again = run_har(scenario, [1, 2], study.folder)
    assert [run.stat().st_mtime_ns for run in runs] == before
    assert again.text == text


def test_another_study_is_refused_there(study: HarStudy, scenario: Tree) -> None:
    with pytest.raises(BadInput, match="holds a study of another config"):
        run_har(merged(scenario, {"training": {"lr": 0.2}}), [1], study.folder)
    with pytest.raises(BadInput, match="no seed twice"):
        run_har(scenario, [1, 1], study.folder)


def test_the_command(
    scenario: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(scenario))
    monkeypatch.chdir(tmp_path)
    line = ["latecomer", "study", "har", "mine.toml", "--seeds", "3", "--quick"]
    monkeypatch.setattr("sys.argv", [*line, "--set", "study.har.scale=[]"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    output = capsys.readouterr().out
    assert "14/14" in output
    assert "## Comparison with the paper" in output
    assert (tmp_path / "runs" / "study-har-mine" / "report.html").is_file()


def test_the_command_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["latecomer", "study", "har", "none.toml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: none.toml: no such config file\n"

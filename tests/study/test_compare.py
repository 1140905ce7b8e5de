"""Comparisons: every strategy and seed once, in the same scenario."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w
import torch
from torch import nn

import latecomer
from latecomer.errors import BadInput, Interrupted
from latecomer.strategies.recipe import build_strategy
from latecomer.study.compare import (
    cell_text,
    cells,
    compare,
    resume_comparison,
    seconds_to,
    spread,
)
from latecomer.study.config import Tree, merged
from latecomer.study.report import write_report
from latecomer.study.results import Comparison, flatten, load
from latecomer.study.terminal import comparison_table

STRATEGIES, SEEDS = ["fedavg", "slow-async"], [3, 1]


@pytest.fixture(scope="module")
def tree(tiny_tree: Tree) -> Tree:
    """fedavg, and fedasync under another label with its own values."""
    slow = {"strategy": {"name": "fedasync", "alpha": 0.2}, "training": {"lr": 0.05}}
    changes = {
        "strategy": {"name": "fedbuff", "size": 3},
        "stop": {"updates": 30},
        "fleet": {"late": {"classes": [5], "devices": 2, "delay": 2}},
        "compare": {"slow-async": slow},
    }
    return merged(tiny_tree, changes)


@pytest.fixture(scope="module")
def done(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "both"
    compare(tree, STRATEGIES, SEEDS, folder)
    write_report(folder)
    return folder


def summary(folder: Path, strategy: str, seed: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"{strategy}-seed{seed}" / "summary.json").read_text()))


def test_one_row_for_each_strategy_and_seed(done: Path) -> None:
    table = pd.read_csv(done / "compare.csv")
    assert list(table.columns[:2]) == ["strategy", "seed"]
    pairs = list(zip(table["strategy"], table["seed"], strict=True))
    assert pairs == [("fedavg", 3), ("fedavg", 1), ("slow-async", 3), ("slow-async", 1)]


def test_a_row_has_every_scalar_of_its_summary(done: Path) -> None:
    table = pd.read_csv(done / "compare.csv").set_index(["strategy", "seed"])
    nested = {"bytes_up", "staleness_mean", "client_accuracy_late_mean", "f1_0", "model_hash"}
    assert nested <= set(table.columns)
    for strategy in STRATEGIES:
        for seed in SEEDS:
            row = table.loc[(strategy, seed)]
            for key, value in flatten(summary(done, strategy, seed)).items():
                if key in ("strategy", "seed"):
                    continue
                if value is None:
                    assert pd.isna(row[key]), key
                else:
                    assert row[key] == (value if isinstance(value, str) else pytest.approx(value))


def test_compare_json_finds_the_runs(done: Path) -> None:
    document = json.loads((done / "compare.json").read_text())
    assert [run["folder"] for run in document["runs"]] == [
        "fedavg-seed3",
        "fedavg-seed1",
        "slow-async-seed3",
        "slow-async-seed1",
    ]
    assert all((done / run["folder"] / "metrics.csv").is_file() for run in document["runs"])
    table = pd.read_csv(done / "compare.csv")
    for strategy in STRATEGIES:
        values = table.loc[table["strategy"] == strategy, "accuracy"]
        found = document["table"][strategy]
        assert found["accuracy_mean"] == pytest.approx(values.mean())
        assert found["accuracy_std"] == pytest.approx(values.std())
        assert found["seeds"] == 2
    found = load(done)
    assert isinstance(found, Comparison)
    assert found.runs["slow-async", 1].summary["seed"] == 1


def test_the_scenario_is_the_same_for_all(done: Path) -> None:
    """The same data, fleet and late devices; another seed gives others."""
    late = {(s, seed): summary(done, s, seed)["late_devices"] for s in STRATEGIES for seed in SEEDS}
    for seed in SEEDS:
        assert late["fedavg", seed] == late["slow-async", seed]
        first = [
            pd.read_csv(done / f"{s}-seed{seed}" / "metrics.csv").iloc[0].drop("wall_seconds")
            for s in STRATEGIES
        ]
        pd.testing.assert_series_equal(*first)
    assert late["fedavg", 1] != late["fedavg", 3]


def test_a_label_has_its_own_values(done: Path) -> None:
    text = (done / "slow-async-seed1" / "config.toml").read_text()
    assert 'name = "fedasync"' in text
    assert "alpha = 0.2\n" in text
    assert "lr = 0.05\n" in text
    assert summary(done, "slow-async", 1)["strategy"] == "fedasync"
    other = (done / "fedavg-seed1" / "config.toml").read_text()
    assert "lr = 0.1\n" in other
    assert "slow-async" not in other


def options(tree: Mapping[str, Any], label: str) -> dict[str, Any]:
    (cell,) = cells(tree, [label], [1])
    return dict(cell.config().strategy.options)


def test_options_reach_only_the_strategy_they_name(tree: Tree) -> None:
    assert options(tree, "fedbuff") == {"size": 3}
    assert options(tree, "fedavg") == {}
    assert options(tree, "slow-async") == {"alpha": 0.2}
    variant = merged(tree, {"compare": {"big": {"strategy": {"name": "fedbuff", "p": 1.0}}}})
    assert options(variant, "big") == {"size": 3, "p": 1.0}
    unnamed = {**tree, "strategy": {"step": 0.5}}
    assert options(unnamed, "latecomer") == {"step": 0.5}
    assert options(unnamed, "fedavg") == {}


def test_the_given_seeds_replace_that_of_the_config(tree: Tree) -> None:
    assert [cell.config().seed for cell in cells(tree, ["fedavg"], [7, 8])] == [7, 8]


def test_side_by_side_is_the_same(done: Path, tree: Tree, tmp_path: Path) -> None:
    done_runs: list[tuple[str, int]] = []
    compare(
        tree,
        STRATEGIES,
        SEEDS,
        tmp_path / "both",
        jobs=2,
        on_run_done=lambda cell, _: done_runs.append((cell.strategy, cell.seed)),
    )
    hashes = [
        pd.read_csv(folder / "compare.csv")[["strategy", "seed", "model_hash"]]
        for folder in (done, tmp_path / "both")
    ]
    pd.testing.assert_frame_equal(*hashes)
    assert hashes[0]["model_hash"].nunique() == 4
    assert sorted(done_runs) == sorted((s, seed) for s in STRATEGIES for seed in SEEDS)


def test_nothing_is_run_if_one_config_is_wrong(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="fedasyn"):
        compare(tree, ["fedavg", "fedasyn"], [1], tmp_path / "both")
    assert not (tmp_path / "both").exists()


RESOURCE = re.compile(r"<[^>]*\b(?:src|href)\s*=\s*[\"']?(?:https?:)?//", re.IGNORECASE)


def test_the_report_loads_nothing(done: Path) -> None:
    page = (done / "report.html").read_text(encoding="utf-8")
    # The chart library lies inside the page; its own strings are no part of the document.
    document = re.sub(r"<script\b.*?</script>", "<script>", page, flags=re.DOTALL)
    assert "<script>" in document
    assert not RESOURCE.search(document)
    assert "@import" not in document
    opened = re.findall(r"<script\b[^>]*>", page)
    assert opened
    assert not any("src" in tag for tag in opened)
    for strategy in STRATEGIES:
        assert f'"{strategy}"' in page


def test_seconds_to_a_target(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("virtual_seconds,accuracy\n0,0.1\n10,0.8\n20,0.7\n30,0.9\n")
    assert seconds_to(path, 0.8) == 10
    assert seconds_to(path, 0.85) == 30
    assert seconds_to(path, 0.95) is None


def test_spread_has_no_mean_where_a_seed_has_no_value() -> None:
    table = pd.DataFrame(
        {
            "strategy": ["b", "b", "a", "a"],
            "accuracy": [0.5, 0.7, 0.1, 0.1],
            "seconds_to_target": [10.0, None, 4.0, 6.0],
        }
    )
    found = spread(table)
    assert list(found.index) == ["b", "a"]
    assert found.loc["b", "accuracy_mean"] == pytest.approx(0.6)
    assert found.loc["b", "accuracy_std"] == pytest.approx(0.02**0.5)
    assert pd.isna(found.loc["b", "seconds_to_target_mean"])
    assert found.loc["a", "seconds_to_target_mean"] == 5.0


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (0.12345, 0.01, "0.123 ± 0.010"),
        (0.5, float("nan"), "0.500"),
        (12.34, 1.0, "12.3 ± 1.0"),
        (12345.6, 7.0, "12,346 ± 7"),
        (float("nan"), float("nan"), "-"),
    ],
)
def test_cells_have_digits_that_make_sense(mean: float, std: float, text: str) -> None:
    assert cell_text(mean, std) == text


def test_an_interrupted_comparison_is_finished_by_resuming(tmp_path):
    """One run is finished, one was interrupted, two have not started."""
    tree = {
        "fleet": {"devices": 5},
        "stop": {"updates": 40},
        "model": {"hidden": [4]},
        "checkpoint": {"every": 10},
    }
    whole = compare(tree, ["fedavg", "fedasync"], [1, 2], tmp_path / "whole")
    cut = tmp_path / "cut"

    def die(cell, summary):
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=f"continue with `latecomer compare --resume {cut}`"):
        compare(tree, ["fedavg", "fedasync"], [1, 2], cut, on_run_done=die)
    (cut / "fedavg-seed1" / "summary.json").unlink()
    resumed = resume_comparison(cut)
    assert resumed["model_hash"].tolist() == whole["model_hash"].tolist()
    with pytest.raises(BadInput, match="no comparison to resume"):
        resume_comparison(tmp_path)


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_comparison(tmp_path):
    config = tmp_path / "long.toml"
    config.write_text(tomli_w.dumps({"stop": {"updates": 10**7}}))
    words = ["compare", str(config), "--strategies", "fedasync,fedbuff", "--jobs", "2"]
    command = [sys.executable, "-m", "latecomer", *words, "--out", str(tmp_path / "out")]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        workers = eventually(lambda: len(children(parent.pid)) >= 3 and children(parent.pid))
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def eventually(check, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := check():
            return found
        time.sleep(0.2)
    raise AssertionError("timed out")


def test_a_label_that_cannot_be_a_strategy_is_refused() -> None:
    tree = {"compare": {"fedbuf": {"training": {"lr": 0.1}}}}
    with pytest.raises(BadInput, match=r"\[compare.fedbuf\].*did you mean 'fedbuff'"):
        cells(tree, ["fedbuff", "fedavg"], [1])
    for fine in ({"fedasync": {}}, {"mine": {"strategy": {"name": "fedbuff"}}}, {"a:b": {}}):
        assert len(cells({"compare": fine}, ["fedavg"], [1])) == 1


def test_a_shared_note_is_reported_once(tree: Tree, tmp_path: Path) -> None:
    notes: list[str] = []
    late = {"classes": [5], "devices": 2, "delay": 5, "only": True}
    changed = {**tree, "fleet": {**tree["fleet"], "late": late}}
    compare(changed, ["fedavg", "privaasyncfed"], [1], tmp_path / "noted", on_note=notes.append)
    (shared,) = [note for note in notes if "fleet.late.only" in note]
    assert "examples are left out" in shared
    (own,) = [note for note in notes if "without privacy" in note]
    assert own.startswith("privaasyncfed without privacy")  # its name once


def test_the_target_is_shown_with_the_time_to_it(done: Path) -> None:
    target = json.loads((done / "compare.json").read_text())["target_accuracy"]
    assert f"target: accuracy {target:g}." in (done / "report.html").read_text(encoding="utf-8")
    table = pd.DataFrame({"strategy": ["fedavg"], "seed": [1], "seconds_to_target": [5.0]})
    assert comparison_table(table, narrow=False).caption is None
    table.attrs["target"] = 0.9
    assert comparison_table(table, narrow=False).caption == "target: accuracy 0.9"


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets).square()


def test_a_comparison_takes_the_python_objects_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {
        "data": (x, x.sum(1)),
        "model": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)),
        "loss": squared,
        "metrics": {"largest": lambda out, y: (out[:, 0] - y).abs().max()},
    }
    tree = {"data": {"partition": "iid"}, "fleet": {"devices": 4}, "stop": {"updates": 12}}
    buffered = build_strategy("fedbuff", {"size": 2})
    strategies = {"mine": buffered, "later": "fedasync"}
    whole = latecomer.compare(tree, strategies, [1], tmp_path / "all", **given)
    assert list(whole.table["strategy"]) == ["mine", "later"]
    assert whole.table["largest"].notna().all()
    assert (tmp_path / "all/report.html").is_file()
    assert "note: " not in caplog.text
    gap = torch.where(x.sum(1) > 1, torch.nan, x.sum(1)).numpy()
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "label": gap})
    latecomer.run(tree, tmp_path / "gaps", **{**given, "data": frame})
    assert "rows have no target and are dropped" in caplog.text
    for label, strategy in strategies.items():
        single = latecomer.run(tree, tmp_path / label, strategy, **given)
        assert whole.runs[label, 1].summary["model_hash"] == single.summary["model_hash"]
        assert (single.folder / "report.html").is_file()
    (tmp_path / "all/compare.csv").unlink()
    shutil.rmtree(tmp_path / "all/mine-seed1")
    with pytest.raises(BadInput, match="resume= takes no names"):
        latecomer.compare(resume=tmp_path / "all", strategies=["mine"], **given)
    objects = {"mine": buffered}
    again = latecomer.compare(resume=tmp_path / "all", strategies=objects, **given)
    assert list(again.table["model_hash"]) == list(whole.table["model_hash"])
    with pytest.raises(BadInput, match=r"jobs = 2: the objects given cannot be copied"):
        latecomer.compare(tree, ["fedasync"], [1], tmp_path / "two", jobs=2, **given)
    with pytest.raises(BadInput, match="at least one strategy"):
        latecomer.compare(tree, out=tmp_path / "none", **given)

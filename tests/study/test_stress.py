"""The stress matrix (`benchmarks/stress.py`): its cells, its scores, and the default strategy."""

import importlib.util
import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stress.py"
METHODS = ("latecomer", "fedbuff", "fedasync", "semi-async")


@pytest.fixture(scope="module")
def stress():
    spec = importlib.util.spec_from_file_location("stress", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["stress"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["stress"]


def test_the_cells_cover_every_pair_of_values(stress):
    cells = stress.cells()
    assert len(cells) >= 120
    for a, b in combinations(stress.FACTORS, 2):
        for va in stress.FACTORS[a]:
            for vb in stress.FACTORS[b]:
                some = any((getattr(c, a), getattr(c, b)) == (va, vb) for c in cells)
                impossible = {va, vb} == {"one-class", 3}
                assert some != impossible, (a, va, b, vb)


def test_cells_that_were_tuned_on_are_not_reported(stress):
    tune, report = ({c.number for c in stress.part(name)} for name in ("tune", "report"))
    assert not tune & report
    assert len(tune | report) == stress.CELLS


def test_scores_by_hand(stress):
    # 0.4 until t = 50, 0.8 until t = 90, then 0.6: the last quarter is 15 s of 0.8, 10 s of 0.6.
    metrics = pd.DataFrame({"virtual_seconds": [0, 50, 90], "accuracy": [0.4, 0.8, 0.6]})
    found = stress.scores(metrics, "accuracy", 100.0)
    assert found["accuracy"] == pytest.approx(0.6 * 0.8 + 0.4 * 0.6, abs=0.005)
    assert found["drop"] == pytest.approx(0.2)


def test_gaps_ranks_and_drops_by_hand(stress):
    rows = [(1, "latecomer", 0.5, 0.2), (1, "fedbuff", 0.6, 0.0), (2, "latecomer", 0.4, 0.0)]
    rows += [(2, "fedbuff", 0.2, 0.3), (4, "latecomer", 0.9, 0.0)]  # cell 4 is not whole
    lines = pd.DataFrame(rows, columns=["cell", "method", "accuracy", "drop"])
    text = stress.tables(lines.assign(seed=1, cpu=[2.0, 1.0, 3.0, 1.0, 1.0]), worst=1)
    assert "2 cells (1 in which the best accuracy exceeds 0.5), 1 seeds" in text
    ours = "| `latecomer` | 0.050 | 0.100 | 0.100 | 50% | 0 | 1.50 | 0.100 | 100% | 2.50 |"
    theirs = "| `fedbuff` | 0.100 | 0.200 | 0.000 | 50% | 0 | 1.50 | 0.150 | 0% | 1.00 |"
    assert ours in text
    assert theirs in text
    assert text.endswith("0.500, best `fedbuff` 0.600, drop 0.20")


def test_the_page_has_the_tables_of_its_results(stress):
    page = stress.PAGE.read_text(encoding="utf-8")
    written = page.partition(stress.BEGIN)[2].partition(stress.END)[0]
    assert written.strip() == stress.tables(pd.read_csv(stress.RESULTS))


@pytest.mark.slow
def test_the_default_is_close_to_the_best_in_the_quick_cells(stress, tmp_path):
    command = [sys.executable, str(SCRIPT), "run", "--part", "quick", "--seeds", "1"]
    command += ["--methods", ";".join(METHODS), "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=SCRIPT.parent)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    table = pd.DataFrame(lines).pivot(index="cell", columns="method", values="accuracy")
    assert table.shape == (stress.QUICK, len(METHODS))
    gap = table.max(axis=1) - table["latecomer"]
    assert gap.mean() <= 0.03
    assert gap[table.max(axis=1) > 0.5].max() <= 0.1

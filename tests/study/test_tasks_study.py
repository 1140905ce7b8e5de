"""The studies of `benchmarks/tasks.py`: the page and its charts are those of the results."""

import sys
from pathlib import Path

import pandas as pd
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def tasks():
    sys.path.insert(0, str(BENCHMARKS))
    import tasks

    yield tasks
    sys.path.remove(str(BENCHMARKS))


def test_scores_by_hand(tasks):
    """Last quarter: 0.4; the best so far is 0.6, the second half begins at 50 s."""
    times, values = [0.0, 40.0, 60.0, 70.0, 100.0], [0.1, 0.6, 0.5, 0.4, 0.4]
    run = pd.DataFrame({"virtual_seconds": times, "score": values, "second": values})
    found = tasks.scores(run.assign(updates=[0, 1, 2, 3, 4]), lower=False)
    assert found == pytest.approx(
        {"score": 0.4, "second": 0.4, "fall": 0.2, "updates": 4, "minutes": 100 / 60}
    )
    assert tasks.scores(run.assign(updates=0), lower=True)["fall"] == pytest.approx(0.5)


def test_only_clear_differences_are_called_so(tasks):
    study = tasks.STUDIES["shakespeare"]
    ends = {"fedavg": (20.0, 21.0, 22.0), "fedbuff": (12.0, 9.0, 12.0), "latecomer": (9.0, 10, 11)}
    rows = [
        {"method": method, "seed": seed, "virtual_seconds": time, "score": score}
        for method, scores in ends.items()
        for seed, score in enumerate(scores)
        for time in (0.0, 1.0)
    ]
    text = tasks.reading(study, pd.DataFrame(rows).assign(second=0.0, updates=1))
    assert text.startswith("`latecomer` has the lowest mean perplexity.")
    assert "Clearly behind it: `fedavg` +11.00 ± 0.00." in text
    assert "Not clearly different from it: `fedbuff` +1.00 ± 4.97." in text


def test_page_and_charts_are_those_of_the_results(tasks, tmp_path):
    results = pd.read_csv(tasks.RESULTS)
    page = tasks.PAGE.read_text(encoding="utf-8")
    assert tasks.sections(page, results) == page
    assert set(results.study) == set(tasks.STUDIES)
    for name, rows in results.groupby("study"):
        drawn = tasks.chart(name, rows, tmp_path)
        assert drawn.read_bytes() == (tasks.FOLDER / drawn.name).read_bytes()

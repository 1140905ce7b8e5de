"""One hostile device whose updates are the first of a run does not spoil the model."""

import importlib.util
from itertools import product
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "early_poison.py"
SPEC = importlib.util.spec_from_file_location("early_poison", PATH)
early_poison = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(early_poison)

EVEN = {"training": {"lr": 0.2, "momentum": 0.5}, "engine": {"kernel": "plain"}}
UPDATES = 200
QUICK = ("fedasync", "fedbuff")
TOGETHER, ALONE = early_poison.HEAD_STARTS


def run(strategy, attack, head_start=TOGETHER, updates=UPDATES, **tables):
    setting = early_poison.Setting(strategy, 100.0, head_start, 1, attack)
    return early_poison.run(setting, updates, **EVEN, **tables)


@pytest.mark.parametrize("head_start", [TOGETHER, ALONE])
@pytest.mark.parametrize(
    "strategy",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in early_poison.STRATEGIES
    ],
)
def test_a_flipped_first_update_of_a_hundred_times_the_size_is_rolled_back(strategy, head_start):
    clean = run(strategy, "clean", head_start)
    assert (clean.refused, clean.quarantines, clean.rollbacks) == (0, 0, 0)
    found = run(strategy, "x -100", head_start)
    assert found.rollbacks >= 1
    assert found.quarantines >= 1
    assert found.ended_by == "updates"
    assert found.accuracy > clean.accuracy - 0.05


def test_an_enormous_first_update_is_refused():
    found = run("fedasync", "x 1e6", updates=60)
    assert found.refused >= 3
    assert found.rollbacks == 0


def test_the_run_may_stop_with_the_model_rolled_back():
    found = run("fedasync", "x -100", server={"most_refused": "stop"})
    assert found.ended_by.endswith("the model was rolled back to version 0")


def test_a_device_that_is_hostile_in_all_updates_is_as_good_as_absent():
    without, found = run("fedbuff", early_poison.WITHOUT), run("fedbuff", early_poison.ALWAYS)
    assert abs(found.accuracy - without.accuracy) < 0.05


def test_the_tables_of_the_page_are_those_of_the_result_file():
    results = early_poison.read()
    columns = (early_poison.CLEAN, early_poison.WITHOUT, *early_poison.ATTACKS)
    axes = early_poison.STRATEGIES, early_poison.ALPHAS, early_poison.HEAD_STARTS
    expected = set(product(*axes, early_poison.SEEDS, columns))
    found = [(r.strategy, r.alpha, r.head_start, r.seed, r.attack) for r in results]
    assert len(found) == len(expected)
    assert set(found) == expected
    page = early_poison.PAGE.read_text(encoding="utf-8")
    written = page.partition(early_poison.BEGIN)[2].partition(early_poison.END)[0]
    assert written.strip() == early_poison.tables(results)

"""One hostile device whose first updates are the first of a run does not spoil the model."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "early_poison.py"
SPEC = importlib.util.spec_from_file_location("early_poison", PATH)
early_poison = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(early_poison)

EVEN = {"data": {"alpha": 100.0}, "training": {"lr": 0.2, "momentum": 0.5}}
UPDATES = 150


QUICK = ("fedasync", "fedbuff")


@pytest.mark.parametrize(
    "strategy",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in early_poison.STRATEGIES
    ],
)
def test_a_flipped_first_update_of_a_hundred_times_the_size_is_rolled_back(strategy):
    clean = early_poison.poisoned(strategy, 1.0, UPDATES, **EVEN)
    assert (clean.totals.refused, clean.totals.quarantines, clean.totals.rollbacks) == (0, 0, 0)
    found = early_poison.poisoned(strategy, -100.0, UPDATES, **EVEN)
    assert found.totals.rollbacks == 1
    assert found.totals.quarantines >= 1
    assert found.ended_by == "updates"
    assert found.finite
    assert found.accuracy > clean.accuracy - 0.05


def test_an_enormous_first_update_is_refused():
    found = early_poison.poisoned("fedasync", 1e6, 60, **EVEN)
    assert found.totals.refused >= 3
    assert (found.totals.rollbacks, found.finite) == (0, True)


def test_the_run_may_stop_with_the_model_rolled_back():
    stop = {"server": {"most_refused": "stop"}}
    found = early_poison.poisoned("fedasync", -100.0, UPDATES, **EVEN, **stop)
    assert found.ended_by.endswith("the model was rolled back to version 0")

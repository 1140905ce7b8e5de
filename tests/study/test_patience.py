"""Early stopping on the devices' validation parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from latecomer.study.experiment import Experiment

Start = Callable[..., tuple[Path, dict[str, Any]]]


def test_a_run_ends_when_validation_no_longer_improves(start: Start) -> None:
    folder, summary = start("stop.updates=2000", "stop.patience=3", "evaluate.every=5")
    table = pd.read_csv(folder / "metrics.csv")
    assert summary["ended_by"] == "patience"
    assert summary["updates"] < 2000
    best = int(table["validation_macro_f1"].idxmax())
    assert best == len(table) - 1 - 3
    assert summary["best"]["updates"] == table["updates"][best]
    assert summary["best"]["macro_f1"] == pytest.approx(table["macro_f1"][best])


def test_without_patience_nothing_is_watched(start: Start) -> None:
    folder, summary = start()
    assert summary["best"] is None
    assert "validation_macro_f1" not in pd.read_csv(folder / "metrics.csv")


def test_the_share_of_validation(tiny: Callable[..., Any]) -> None:
    federations = [
        Experiment(tiny(f"data.validation={share}", "data.partition=iid")).federation
        for share in ("0.0", "0.3")
    ]
    assert [len(each.validation.y) for each in federations] == [0, 540]
    # What is tested does not hang on it.
    assert len(federations[0].test.y) == len(federations[1].test.y)

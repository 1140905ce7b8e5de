"""Opt-in: real datasets in the folder LATECOMER_DATA; skipped where there are none."""

import os
from pathlib import Path

import numpy as np
import pytest

from latecomer.data.federation import federate
from latecomer.data.sources import load

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("LATECOMER_DATA") or ROOT.parent / "shared" / "data")


def real(name: str) -> str:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not here; set LATECOMER_DATA to the folder that holds it")
    return str(path)


def test_uci_har() -> None:
    data = load("npz", real("uci_har.npz"))
    assert data.x.shape == (10299, 265)
    assert data.subject is not None
    assert len(np.unique(data.subject)) == 30
    assert data.test is not None
    assert data.test.sum() == 2947
    made = federate(
        data,
        partition="by-subject",
        devices=30,
        alpha=1.0,
        test="fair",
        scale="global",
        augment="none",
        seed=0,
    )
    assert len(made.clients) == 30
    assert made.notes == ()
    assert made.pooled().x.mean(0).abs().max() < 1e-4


def test_mnist() -> None:
    data = load("mnist", real("mnist.npz"))
    assert data.x.shape == (70000, 1, 28, 28)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.test is not None
    assert data.test.sum() == 10000
    assert data.num_classes == 10

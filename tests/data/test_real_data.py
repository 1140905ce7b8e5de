"""Opt-in: real datasets in the folder LATECOMER_DATA; skipped where there are none."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from latecomer.data import extrasensory, uci_har
from latecomer.data.dataset import SourceOptions
from latecomer.data.federated_dataset import federate
from latecomer.data.sources import load_dataset

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("LATECOMER_DATA") or ROOT.parent / "shared" / "data")


def real(name: str) -> str:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is missing; set LATECOMER_DATA to its folder")
    return str(path)


def test_uci_har() -> None:
    data = load_dataset("npz", real("uci_har.npz"))
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
    data = load_dataset("mnist", real("mnist.npz"))
    assert data.x.shape == (70000, 1, 28, 28)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.test is not None
    assert data.test.sum() == 10000
    assert data.num_classes == 10


def folder(name: str) -> Path:
    path = FOLDER / name
    if not path.is_dir():
        pytest.skip(f"{name} is missing; set LATECOMER_DATA to its folder")
    return path


def test_extrasensory() -> None:
    data = load_dataset("extrasensory", str(folder("extrasensory")))
    assert data.x.shape == (21976, 161)
    assert data.num_classes == 6
    assert data.subject is not None
    assert len(np.unique(data.subject)) == 10
    assert 0.1 < np.isnan(data.x).mean() < 0.2
    assert data.notes == ("1911 of 23887 rows have no label and are dropped",)


def test_extrasensory_columns_are_the_published_ones() -> None:
    columns = (folder("formats") / "extrasensory_columns.txt").read_text().split()
    assert len(columns) == extrasensory.COLUMNS
    labels = [name.removeprefix("label:") for name in columns if name.startswith("label:")]
    assert len(labels) == 51
    assert set(extrasensory.MAIN_ACTIVITIES) <= set(labels)
    blocks = {name.split(":")[0] for name in columns[1:226]}
    assert blocks <= {name.split(":")[0] for name in extrasensory.SENSORS.values()}


def test_uci_har_rows_are_the_published_ones(tmp_path: Path) -> None:
    """The official labels and subjects, with random features: 10,299 rows and no note."""
    root = tmp_path / "UCI HAR Dataset"
    shutil.copytree(folder("formats") / "uci_har", root, copy_function=shutil.copyfile)
    for split, rows in uci_har.PUBLISHED_ROWS.items():
        line = " 0.0000000e+000" * uci_har.FEATURES + "\n"
        (root / split).chmod(0o755)
        (root / split / f"X_{split}.txt").write_text(line * rows)
    data = load_dataset("uci-har", str(tmp_path))
    assert data.x.shape == (7352 + 2947, 561)
    assert data.test is not None
    assert data.test.sum() == 2947
    assert data.subject is not None
    assert np.unique(data.subject).tolist() == list(range(1, 31))
    assert data.num_classes == 6
    assert data.notes == ()


def test_a_real_line_of_pamap2(tmp_path: Path) -> None:
    line = (folder("formats") / "pamap2_subject101_first_line.dat").read_text().strip()
    (tmp_path / "Protocol").mkdir()
    walking = line.split()
    walking[1] = "4"
    lying = [*walking]
    lying[1] = "1"
    text = "\n".join([line] + [" ".join(walking)] * 4 + [" ".join(lying)] * 4) + "\n"
    (tmp_path / "Protocol" / "subject101.dat").write_text(text)
    data = load_dataset("pamap2", str(tmp_path), SourceOptions(length=2))
    assert data.x.shape == (6, 2, 31)
    assert data.x[0, 0, :3].tolist() == pytest.approx([104, 30, 2.37223])


def test_watch() -> None:
    if find_spec("seglearn") is None:
        pytest.skip("seglearn is not installed")
    data = load_dataset("watch")
    assert data.x.shape == (4677, 100, 6)
    assert data.num_classes == 7

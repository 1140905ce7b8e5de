"""The real file is in the opt-in tests; here is what surrounds it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from latecomer.data import watch
from latecomer.data.dataset import SourceOptions
from latecomer.data.sources import load_dataset
from latecomer.errors import BadInput


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed seglearn that cannot be imported, with nothing in its folder for data."""
    folder = tmp_path / "seglearn"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "seglearn", raising=False)
    return folder / "data" / "watch_dataset.npy"


def test_without_the_file(package: Path) -> None:
    with pytest.raises(BadInput, match="pip install --no-deps seglearn"):
        load_dataset("watch")


def test_another_file_is_not_unpickled(package: Path) -> None:
    np.save(package, np.array({"X": []}, dtype=object), allow_pickle=True)
    with pytest.raises(BadInput, match="it is not read"):
        load_dataset("watch")


def test_windows_by_subject(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.touch()
    recorded = {
        "X": [np.full((9, 6), 1.0), np.full((6, 6), 2.0), np.full((3, 6), 3.0)],
        "y": np.array([0, 1, 1]),
        "subject": np.array([2, 1, 1]),
        "y_labels": ["PEN", "ABD"],
    }
    monkeypatch.setattr(watch, "_load", lambda path: recorded)
    data = load_dataset("watch", options=SourceOptions(length=4, step=2))
    assert data.x[:, 0, 0].tolist() == [2, 2, 1, 1, 1]
    assert data.y.tolist() == [1, 1, 0, 0, 0]
    assert data.subject is not None
    assert data.subject.tolist() == [1, 1, 2, 2, 2]
    assert data.notes == ("4 of 18 samples at the ends of recordings fill no window",)
    with pytest.raises(BadInput, match="the longest recording has 9"):
        load_dataset("watch", options=SourceOptions(length=10))
    with pytest.raises(BadInput, match=r"'watch' has no option data\.sensors"):
        load_dataset("watch", options=SourceOptions(sensors=("hand",)))

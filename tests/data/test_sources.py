from pathlib import Path

import numpy as np
import pytest

from latecomer.data.sources import SOURCES, load_dataset
from latecomer.errors import BadInput


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LATECOMER_DATA", raising=False)


def save(path: Path, value: float) -> None:
    np.savez(path, x=np.full((2, 1), value), y=np.array([0, 1]))


def test_the_registry_describes_itself() -> None:
    assert {"digits", "npz", "mnist"} <= set(SOURCES)
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.summary


def test_digits() -> None:
    data = load_dataset("digits", "")
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.class_names == tuple("0123456789")


def test_a_relative_path_is_looked_up_here_then_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save(tmp_path / "store" / "a.npz", 1)
    with pytest.raises(BadInput, match=r"a\.npz: no such file or folder"):
        load_dataset("npz", "a.npz")
    monkeypatch.setenv("LATECOMER_DATA", str(tmp_path / "store"))
    assert load_dataset("npz", "a.npz").x[0] == 1
    save(tmp_path / "here" / "a.npz", 2)
    assert load_dataset("npz", "a.npz").x[0] == 2
    with pytest.raises(BadInput, match=r"b.npz: .*store.b.npz \(LATECOMER_DATA\)"):
        load_dataset("npz", "b.npz")


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("cifar", "", r"data source 'cifar' is unknown.* \(allowed: digits, npz, csv"),
        ("npz", "", "'npz' needs a path"),
        ("mnist", "", "'mnist' needs a path"),
        ("digits", "digits.npz", "takes no path"),
        ("npz", "a" * 5000, "no such file"),
        ("npz", "a\0b", "no such file"),
        ("npz", "~nobody-of-that-name/a.npz", "no such file"),
        ("npz", ".", "the array .x. is missing; expected x and y in x.npy"),
    ],
)
def test_bad_requests(source: str, path: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_dataset(source, path)

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latecomer.data.npz import read_npz
from latecomer.errors import BadInput

Y = np.array([0, 1, 0])


def save(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def test_reads_the_whole_layout(tmp_path: Path) -> None:
    path = save(
        tmp_path / "a.npz",
        x=np.array([[1, np.nan], [2, 3], [4, 5]], dtype=np.float16),
        y=Y,
        subject=np.array([7, 7, 8]),
        test=np.array([False, False, True]),
        class_names=np.array([b"walk", b"run"]),
    )
    data = read_npz(path)
    assert data.x.dtype == np.float32
    np.testing.assert_array_equal(data.x, [[1, np.nan], [2, 3], [4, 5]])
    np.testing.assert_array_equal(data.subject, [7, 7, 8])
    np.testing.assert_array_equal(data.test, [False, False, True])
    assert data.class_names == ("walk", "run")


@pytest.mark.parametrize(
    ("given", "shape", "highest"),
    [
        ((3, 2, 5), (3, 1, 2, 5), 1.0),
        ((3, 3, 2, 5), (3, 3, 2, 5), 1.0),
        ((3, 4), (3, 4), 255.0),
    ],
)
def test_uint8_images_are_scaled_and_tables_are_not(
    tmp_path: Path, given: tuple[int, ...], shape: tuple[int, ...], highest: float
) -> None:
    data = read_npz(save(tmp_path / "a.npz", x=np.full(given, 255, dtype=np.uint8), y=Y))
    assert data.x.shape == shape
    assert data.x.max() == highest


def test_an_unused_pickled_array_does_no_harm(tmp_path: Path) -> None:
    extra = np.array([{}], dtype=object)
    assert len(read_npz(save(tmp_path / "a.npz", x=np.ones((3, 1)), y=Y, extra=extra))) == 3


def missing(path: Path) -> None:
    pass


def folder(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch()


def text(path: Path) -> None:
    path.write_text("x,y\n1,2\n")


def truncated(path: Path) -> None:
    save(path, x=np.random.default_rng(0).normal(size=(3, 50)), y=Y)
    path.write_bytes(path.read_bytes()[:300])


def damaged(path: Path) -> None:
    np.savez(path, x=np.ones((3, 50)), y=Y)
    path.write_bytes(path.read_bytes().replace(np.float64(1).tobytes() * 9, b"\1" * 72, 1))


def single_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def no_x(path: Path) -> None:
    save(path, data=np.ones((3, 1)), y=Y)


def no_y(path: Path) -> None:
    save(path, x=np.ones((3, 1)))


def pickled(path: Path) -> None:
    save(path, x=np.array([[{}]] * 3, dtype=object), y=Y)


def text_values(path: Path) -> None:
    save(path, x=np.array([["1"]] * 3), y=Y)


def numbers_as_names(path: Path) -> None:
    save(path, x=np.ones((3, 1)), y=Y, class_names=np.array([1, 2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (missing, "no such file"),
        (folder, "the array 'x' is missing; expected x and y in x.npy and y.npy"),
        (empty, "cannot read the file"),
        (text, "is not an .npz file"),
        (truncated, "expected an intact .npz file|is not an .npz file"),
        (damaged, "cannot read the array 'x' .*expected an intact .npz file"),
        (single_array, "holds a single array"),
        (no_x, "the array 'x' is missing"),
        (no_y, "the array 'y' is missing"),
        (pickled, "the array 'x' holds pickled objects"),
        (text_values, "x is <U1; expected numbers"),
        (numbers_as_names, "class_names is int64"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_files_are_one_clear_line(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "bad.npz"
    make(path)
    with pytest.raises(BadInput, match=message) as caught:
        read_npz(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)

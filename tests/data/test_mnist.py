import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latecomer.data.mnist import read_idx, read_mnist
from latecomer.errors import BadInput

# Two train images and one test image of 1 x 2 pixels, byte by byte.
IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 51, 102, 255])
LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 3])
TEST_IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 2, 255, 0])
TEST_LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 1, 9])
FILES = {
    "train-images-idx3-ubyte": IMAGES,
    "train-labels-idx1-ubyte": LABELS,
    "t10k-images-idx3-ubyte": TEST_IMAGES,
    "t10k-labels-idx1-ubyte": TEST_LABELS,
}


def write_idx(folder: Path, dotted: bool = False, zipped: bool = False) -> None:
    for name, data in FILES.items():
        spelled = name.replace("-idx", ".idx") if dotted else name
        if zipped:
            (folder / f"{spelled}.gz").write_bytes(gzip.compress(data))
        else:
            (folder / spelled).write_bytes(data)


def check(path: Path) -> None:
    data = read_mnist(path)
    np.testing.assert_allclose(data.x, [[[[0, 0.2]]], [[[0.4, 1]]], [[[1, 0]]]])
    assert [data.class_names[label] for label in data.y] == ["7", "3", "9"]
    np.testing.assert_array_equal(data.test, [False, False, True])
    assert data.num_classes == 10


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path: Path, dotted: bool, zipped: bool) -> None:
    write_idx(tmp_path, dotted, zipped)
    check(tmp_path)


def keras() -> dict[str, Any]:
    return {
        "x_train": np.array([[[0, 51]], [[102, 255]]], dtype=np.uint8),
        "y_train": np.array([7, 3], dtype=np.uint8),
        "x_test": np.array([[[255, 0]]], dtype=np.uint8),
        "y_test": np.array([9], dtype=np.uint8),
    }


def test_npz_of_keras_and_ours_by_file_or_folder(tmp_path: Path) -> None:
    arrays = keras()
    path = tmp_path / "mnist.npz"
    np.savez(path, **arrays)
    check(path)
    check(tmp_path)
    np.savez(
        path,
        x=np.concatenate([arrays["x_train"], arrays["x_test"]]),
        y=np.array([7, 3, 9]),
        class_names=np.array(list("0123456789")),
        test=np.array([False, False, True]),
    )
    check(path)
    check(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", IMAGES[:-1], r"3 values for shape \(2, 1, 2\); expected 4"),
        ("train-images-idx3-ubyte", IMAGES[:9], "not an idx file"),
        ("train-images-idx3-ubyte", LABELS, "not an idx file"),
        ("train-labels-idx1-ubyte", LABELS + b"\0", "3 values"),
        ("train-labels-idx1-ubyte", TEST_LABELS, "2 train images have labels of shape"),
        ("train-labels-idx1-ubyte", LABELS[:-1] + b"\x0a", "label 10 in row 1"),
        (
            "t10k-images-idx3-ubyte",
            bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 5, 5]),
            "expected one size",
        ),
        ("t10k-labels-idx1-ubyte", None, "no t10k-labels-idx1-ubyte"),
    ],
)
def test_bad_idx_files(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    write_idx(tmp_path)
    if data is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(BadInput, match=message) as caught:
        read_mnist(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("data", [b"plain", gzip.compress(IMAGES)[:-12]], ids=["plain", "cut"])
def test_bad_gzip(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(data)
    with pytest.raises(BadInput, match="cannot read the file"):
        read_idx(path, 3)


def test_images_of_a_wrong_type(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez(path, **keras() | {"x_test": np.zeros((1, 1, 2))})
    with pytest.raises(BadInput, match="the test images are float64"):
        read_mnist(path)
    np.savez(path, x=np.zeros((2, 1, 2)), y=np.array([0, 1]))
    with pytest.raises(BadInput, match="expected uint8 images"):
        read_mnist(path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected the four MNIST idx files, or mnist"):
        read_mnist(tmp_path)

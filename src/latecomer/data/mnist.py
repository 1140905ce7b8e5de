"""Reader of MNIST: the published idx files, or one .npz file.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-based learning applied to document
recognition. Proceedings of the IEEE 86(11), 1998.
"""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latecomer.data.dataset import Dataset
from latecomer.data.npz import Array, read_arrays, read_npz
from latecomer.errors import BadInput

DIGITS = tuple("0123456789")


def read_mnist(path: Path) -> Dataset:
    """MNIST from a folder of idx files, a folder with mnist.npz, or an .npz file."""
    if not path.is_dir():
        return _from_npz(path)
    if _find(path, "train", "images", 3) is None and (path / "mnist.npz").is_file():
        return _from_npz(path / "mnist.npz")
    train = [_from_folder(path, "train", *kind) for kind in (("images", 3), ("labels", 1))]
    test = [_from_folder(path, "t10k", *kind) for kind in (("images", 3), ("labels", 1))]
    return _joined(path, *train, *test)


def _from_npz(path: Path) -> Dataset:
    keys = ("x_train", "y_train", "x_test", "y_test")  # the layout of Keras
    arrays = read_arrays(path, keys)
    if len(arrays) == len(keys):
        return _joined(path, *(arrays[key] for key in keys))
    dataset = read_npz(path)
    if dataset.x.ndim != 4:
        raise BadInput(f"{path}: x has shape {dataset.x.shape}; expected uint8 images (n, h, w)")
    return dataset


def _joined(path: Path, x: Array, y: Array, x_test: Array, y_test: Array) -> Dataset:
    """Training rows, then test rows, which are the official test rows."""
    for part, images, labels in (("train", x, y), ("test", x_test, y_test)):
        if images.dtype != np.uint8 or images.ndim != 3:
            raise BadInput(
                f"{path}: the {part} images are {images.dtype} {images.shape}; "
                "expected uint8 (n, h, w)"
            )
        if labels.shape != (len(images),):
            raise BadInput(
                f"{path}: {len(images)} {part} images have labels of shape {labels.shape}; "
                "expected one label each"
            )
    if x.shape[1:] != x_test.shape[1:]:
        raise BadInput(
            f"{path}: train images are {x.shape[1:]} and test images {x_test.shape[1:]}; "
            "expected one size"
        )
    return Dataset(
        x=np.concatenate([x, x_test]),
        y=np.concatenate([y, y_test]),
        test=np.arange(len(x) + len(x_test)) >= len(x),
        class_names=DIGITS,
        where=str(path),
    )


def _from_folder(folder: Path, part: str, kind: str, ndim: int) -> NDArray[np.uint8]:
    path = _find(folder, part, kind, ndim)
    if path is None:
        raise BadInput(
            f"{folder}: no {part}-{kind}-idx{ndim}-ubyte[.gz]; "
            "expected the four MNIST idx files, or mnist.npz"
        )
    return read_idx(path, ndim)


def _find(folder: Path, part: str, kind: str, ndim: int) -> Path | None:
    names = [f"{part}-{kind}{dot}idx{ndim}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """The uint8 array with `ndim` axes in an idx file, gzipped or not.

    The format: two zero bytes, the type (8 = uint8), the number of axes, the length of each axis
    as a big-endian uint32, the values.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot read the file ({error}); expected an idx file") from None
    start = 4 + 4 * ndim
    if len(data) < start or data[:4] != bytes([0, 0, 8, ndim]):
        raise BadInput(f"{path}: not an idx file of uint8 with {ndim} axes (magic {data[:4]!r})")
    shape = struct.unpack(f">{ndim}I", data[4:start])
    if len(data) - start != prod(shape):
        raise BadInput(
            f"{path}: {len(data) - start} values for shape {shape}; expected {prod(shape)}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)

from pathlib import Path

import numpy as np
import pytest

from latecomer.data import images
from latecomer.data.dataset import SourceOptions
from latecomer.data.images import read_folder
from latecomer.data.stored import StoredInputs
from latecomer.errors import BadInput

Image = pytest.importorskip("PIL.Image")


def paint(path: Path, value: int, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value, 0, 255) if mode == "RGB" else value).save(path)


def test_a_folder_per_class(tmp_path: Path) -> None:
    for i, name in enumerate(["dog/1.png", "cat/1.png", "cat/2.PNG"]):
        paint(tmp_path / name, 51 * i)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    data = read_folder(tmp_path, SourceOptions())
    assert data.x.shape == (3, 3, 3, 4)
    assert (data.class_names, data.y.tolist()) == (("cat", "dog"), [0, 0, 1])
    np.testing.assert_allclose(data.x[:, :, 0, 0], [[0.2, 0, 1], [0.4, 0, 1], [0, 0, 1]])
    assert data.subject is None


def test_a_folder_per_device_and_class(tmp_path: Path) -> None:
    for name in ("d1/cat/1.png", "d1/dog/2.png", "d2/dog/1.png"):
        paint(tmp_path / name, 9, mode="L")
    data = read_folder(tmp_path, SourceOptions())
    assert data.x.shape == (3, 1, 3, 4)
    assert data.subject is not None
    assert data.subject.tolist() == ["d1", "d1", "d2"]


def test_train_and_test_folders(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "test/dog/1.png"):
        paint(tmp_path / name, 9)
    data = read_folder(tmp_path, SourceOptions(size=2, variant="grey"))
    assert data.x.shape == (3, 1, 2, 2)
    assert data.test is not None
    assert data.test.tolist() == [True, False, False]
    assert data.subject is None


def test_many_images_are_read_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, name in enumerate(["dog/1.png", "cat/1.png", "cat/2.png"]):
        paint(tmp_path / name, 51 * i)
    copied = read_folder(tmp_path, SourceOptions())
    monkeypatch.setattr(images, "IN_MEMORY_BYTES", 0)
    stored = read_folder(tmp_path, SourceOptions())
    assert isinstance(stored.x, StoredInputs)
    np.testing.assert_array_equal(stored.x[[2, 0]], copied.x[[2, 0]])


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no image below it"):
        read_folder(tmp_path, SourceOptions())
    paint(tmp_path / "a" / "1.png", 1)
    with pytest.raises(BadInput, match="is a file; expected a folder"):
        read_folder(tmp_path / "a" / "1.png", SourceOptions())
    with pytest.raises(BadInput, match="every label is a"):
        read_folder(tmp_path, SourceOptions())
    paint(tmp_path / "b" / "1.png", 1, size=(7, 3))
    with pytest.raises(BadInput, match=r"1.png: 7 x 3 pixels, the first image has 4 x 3; .*size"):
        read_folder(tmp_path, SourceOptions())
    assert read_folder(tmp_path, SourceOptions(size=5)).x.shape == (2, 3, 5, 5)
    with pytest.raises(BadInput, match=r"data.variant 'gray' is unknown; did you mean 'grey'"):
        read_folder(tmp_path, SourceOptions(variant="gray"))
    (tmp_path / "b" / "2.png").write_bytes(b"\x89PNG nothing")
    with pytest.raises(BadInput, match=r"2.png: is not a readable image"):
        read_folder(tmp_path, SourceOptions(size=5))
    paint(tmp_path / "c" / "d" / "e.png", 1)
    with pytest.raises(BadInput, match="images are 1, 2 folders deep"):
        read_folder(tmp_path, SourceOptions(size=5))

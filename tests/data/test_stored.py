from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latecomer.data import federated_dataset
from latecomer.data.dataset import Dataset
from latecomer.data.federated_dataset import FederatedDataset, concatenate, federate
from latecomer.data.npz import read_npz
from latecomer.data.stored import StoredInputs, concatenated, mapped
from latecomer.errors import BadInput

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)).astype(np.float32)
Y = np.arange(60) % 3


def write(folder: Path, **arrays: Any) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def lay_out(dataset: Dataset, **change: Any) -> FederatedDataset:
    options: dict[str, Any] = {
        "partition": "dirichlet",
        "devices": 5,
        "alpha": 0.5,
        "test": "fair",
        "scale": "global",
        "augment": "none",
        "seed": 3,
    }
    return federate(dataset, **options | change)


def same(one: FederatedDataset, other: FederatedDataset) -> None:
    pairs = [(one.test, other.test), (one.validation, other.validation)]
    for a, b in zip(one.clients, other.clients, strict=True):
        pairs += [(a.train, b.train), (a.validation, b.validation), (a.test, b.test)]
    for a, b in pairs:
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        index = torch.randperm(len(a.y))[:4]
        assert torch.equal(a.take(index).x, b.x[index])
        assert torch.equal(a.take(index).y, b.y[index])


@pytest.mark.parametrize("scale", ["global", "local", "none"])
@pytest.mark.parametrize("test", ["fair", "held-out-clients", "official"])
def test_a_folder_of_npy_gives_the_examples_of_the_npz(
    tmp_path: Path, scale: str, test: str
) -> None:
    arrays = {"x": X, "y": Y, "test": np.arange(60) % 5 == 0}
    np.savez(tmp_path / "all.npz", **arrays)
    stored, copied = read_npz(write(tmp_path / "all", **arrays)), read_npz(tmp_path / "all.npz")
    assert isinstance(stored.x, StoredInputs)
    for augment in ("none", "balanced"):
        options = {"scale": scale, "test": test, "augment": augment}
        same(lay_out(stored, **options), lay_out(copied, **options))


def test_images_on_disk_stay_bytes_until_they_are_read(tmp_path: Path) -> None:
    images = RNG.integers(0, 255, (60, 4, 5)).astype(np.uint8)
    stored = read_npz(write(tmp_path / "images", x=images, y=Y))
    assert (stored.x.shape, stored.x.dtype) == ((60, 1, 4, 5), np.float32)
    same(lay_out(stored), lay_out(Dataset(x=images, y=Y)))


def test_tokens_on_disk_are_integers(tmp_path: Path) -> None:
    tokens = RNG.integers(0, 9, (60, 4)).astype(np.uint8)
    stored = read_npz(write(tmp_path / "tokens", x=tokens, y=tokens))
    assert (stored.x.dtype, stored.num_outputs) == (np.int64, 9)
    same(lay_out(stored, partition="iid"), lay_out(Dataset(x=tokens, y=tokens), partition="iid"))


class Counting:
    def __init__(self) -> None:
        self.read: list[int] = []

    def inputs(self) -> StoredInputs:
        def read(rows: Any) -> Any:
            self.read += rows.tolist()
            return X[rows]

        return StoredInputs(read, X.shape, X.dtype)


def test_nothing_is_read_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated_dataset, "RECENT_BYTES", 0)
    counting = Counting()
    made = lay_out(Dataset(x=counting.inputs(), y=Y), scale="none")
    assert sum(len(client.train.y) for client in made.clients) == 40
    assert made.clients[0].train.stored
    assert not counting.read
    for device in (0, 0, 1, 0):
        assert len(made.clients[device].train.x) == len(made.clients[device].train.y)
    rows = torch.cat([made.clients[device].train_rows for device in (0, 1, 0)])
    assert counting.read == rows.tolist()  # the part that was used last is kept


def test_some_of_a_concatenation_are_read_alone() -> None:
    counting = Counting()
    made = lay_out(Dataset(x=counting.inputs(), y=Y), scale="none")
    some = made.test.take(torch.tensor([7, 0, 3]))
    assert len(counting.read) <= 4  # three and one to learn the shape
    assert torch.equal(some.x, made.test.x[[7, 0, 3]])
    both = concatenate([made.test, made.validation])
    assert torch.equal(both.x, torch.cat([made.test.x, made.validation.x]))


def test_stored_and_copied_inputs_concatenate() -> None:
    both = concatenated([mapped(X[:10]), X[10:]])
    np.testing.assert_array_equal(both[[59, 3, 10, 9]], X[[59, 3, 10, 9]])
    assert both.shape == X.shape


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "'y' is missing; expected x and y in x.npy and y.npy"),
        ({"x": X[:50], "y": Y}, "x has 50 rows and y has 60"),
        ({"x": np.array([{}], dtype=object), "y": Y}, "the array 'x' holds pickled objects"),
    ],
)
def test_bad_folders(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_npz(write(tmp_path / "bad", **arrays))

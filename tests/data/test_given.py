from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from latecomer.data import given as module
from latecomer.data.dataset import SourceOptions
from latecomer.data.given import GivenData, from_objects, load_given
from latecomer.data.stored import StoredInputs
from latecomer.errors import BadInput

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.array([3, 1, 1, 3, 1, 3])


class Items:
    """A map-style dataset, with any kind of item."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


class ClassLabel:
    names = ("no", "yes")


class Columns(Items):
    """A stand-in with the interface of `datasets.Dataset`."""

    def __init__(self, frame: pd.DataFrame, names: bool = False) -> None:
        super().__init__(*frame.to_dict("records"))
        self.frame, self.column_names = frame, list(frame.columns)
        self.features = {"label": ClassLabel()} if names else {}

    def to_pandas(self) -> pd.DataFrame:
        return self.frame


def read(given: Any, **options: Any) -> GivenData:
    return from_objects(given, SourceOptions(**options))


@pytest.mark.parametrize(
    "given",
    [
        (X, Y),
        (X.tolist(), Y.tolist()),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        (torch.from_numpy(X).bfloat16(), torch.from_numpy(Y)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        torch.utils.data.Subset(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), range(6)),
        Items(*zip(X, Y, strict=True)),
        Items(*({"pixels": x, "label": int(y)} for x, y in zip(X, Y, strict=True))),
        Columns(pd.DataFrame({"pixels": X.tolist(), "label": Y})),
        Columns(pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y})),
        pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": Y}),
    ],
    ids=lambda given: type(given).__name__,
)
def test_one_dataset_of_every_kind(given: Any) -> None:
    found = read(given)
    np.testing.assert_array_equal(found.dataset.x, X)
    assert found.dataset.y.tolist() == [1, 0, 0, 1, 0, 1]
    assert found.dataset.class_names == ("1", "3")
    assert (found.partition, found.test) == ("", "")
    assert found.dataset.x.dtype == np.float32


def test_class_names_of_datasets() -> None:
    frame = pd.DataFrame({"x": X.tolist(), "label": Y // 3})
    assert read(Columns(frame, names=True)).dataset.class_names == ("no", "yes")


def test_one_dataset_per_device() -> None:
    found = read([(X[:1], Y[:1]), Items(*zip(X[1:3], Y[1:3], strict=True)), (X[3:], Y[3:])])
    assert found.partition == "by-subject"
    assert found.dataset.subject is not None
    assert found.dataset.subject.tolist() == [0, 1, 1, 2, 2, 2]
    np.testing.assert_array_equal(found.dataset.x, X)


def test_more_than_ten_devices_keep_their_order() -> None:
    found = read([(X + i, Y) for i in range(12)])
    assert found.dataset.subject is not None
    rows = [np.flatnonzero(found.dataset.subject == d) for d in np.unique(found.dataset.subject)]
    assert [found.dataset.x[r].min() for r in rows] == list(range(12))


def test_a_central_test_set() -> None:
    found = read({"train": (X[:4], Y[:4]), "test": (X[4:], Y[4:])})
    assert (found.partition, found.test) == ("", "official")
    assert found.dataset.test is not None
    assert found.dataset.test.tolist() == [False] * 4 + [True] * 2
    found = read({"train": [(X[:2], Y[:2]), (X[2:4], Y[2:4])], "test": (X[4:], Y[4:])})
    assert (found.partition, found.test) == ("by-subject", "official")
    assert read({"train": (X, Y)}).test == ""


def test_frames_of_devices_are_encoded_together() -> None:
    one = pd.DataFrame({"city": ["Rome", "Oslo"], "label": ["a", "b"]})
    other = pd.DataFrame({"city": ["Bern", "Rome", "Rome"], "label": ["b", None, "a"]})
    found = read([one, other]).dataset
    assert found.x.tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert found.subject is not None
    assert found.subject.tolist() == [0, 0, 1, 1]


def test_subjects_of_a_frame_and_of_items() -> None:
    frame = pd.DataFrame({"a": X[:, 0], "label": Y, "who": list("bbaacc")})
    found = read(frame, subject="who").dataset
    assert found.subject is not None
    assert found.subject.tolist() == list("bbaacc")
    items = Items(*({"x": x, "label": 1, "who": w} for x, w in zip(X, "bbaacc", strict=True)))
    items.items[0]["label"] = 2
    found = read(items, subject="who").dataset
    assert found.subject is not None
    assert found.subject.tolist() == list("bbaacc")


def test_pillow_images_become_channels_first() -> None:
    image = pytest.importorskip("PIL.Image")
    items = [(image.new("RGB", (3, 2), (255, 0, 51 * i)), i % 2) for i in range(4)]
    data = read(Items(*items)).dataset
    assert data.x.shape == (4, 3, 2, 3)
    np.testing.assert_allclose(data.x[2, :, 0, 0], [1, 0, 0.4])


def test_large_data_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", X)
    stored = read((np.load(tmp_path / "x.npy", mmap_mode="r"), Y)).dataset
    assert isinstance(stored.x, StoredInputs)
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 0)
    items = read(Items(*zip(X, Y, strict=True))).dataset
    assert isinstance(items.x, StoredInputs)
    np.testing.assert_array_equal(items.x[[5, 0]], X[[5, 0]])
    both = read([(X, Y), Items(*zip(X, Y, strict=True))]).dataset
    np.testing.assert_array_equal(both.x[[11, 0]], X[[5, 0]])


class Noisy(Items):
    def __getitem__(self, row: int) -> Any:
        return torch.rand(2), row % 2


def test_random_transforms_give_the_same_example_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    first = read(Noisy(*range(4))).dataset.x[:]
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, read(Noisy(*range(4))).dataset.x[:])
    assert (first[0] != first[1]).any()
    monkeypatch.setattr(module, "IN_MEMORY_BYTES", 0)
    np.testing.assert_array_equal(first, read(Noisy(*range(4))).dataset.x[:])


def test_the_fingerprint_depends_on_every_value() -> None:
    changed = X.copy()
    changed[5, 1] += 1
    several = [
        read((X, Y)),
        read((changed, Y)),
        read((X, Y[::-1])),
        read((X, Y * 2)),
        read([(X[:3], Y[:3]), (X[3:], Y[3:])]),
        read([(X[:2], Y[:2]), (X[2:], Y[2:])]),
        read({"train": (X[:4], Y[:4]), "test": (X[4:], Y[4:])}),
    ]
    assert len({each.fingerprint() for each in several}) == len(several)
    assert read((X.copy(), Y.copy())).fingerprint() == several[0].fingerprint()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from []


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lengths": ((X, Y[:5]), {}, "data: x has 6 rows and y has 5"),
    "array alone": (X, {}, r"data: is a ndarray; expected \(x, y\), a map-style"),
    "number": (3, {}, "data: is a int; expected"),
    "iterable": (Endless(), {}, "IterableDataset has no row numbers"),
    "no device": ([], {}, "the list has no device"),
    "empty device": ([(X, Y), (X[:0], Y[:0])], {}, "device 1 has no examples"),
    "empty items": ([(X, Y), Items()], {}, "device 1 has no examples"),
    "empty frame": (
        [pd.DataFrame({"a": [1.0, 2.0], "label": [0, 1]}), pd.DataFrame({"a": [], "label": []})],
        {},
        "device 1 has no examples",
    ),
    "shapes": ([(X, Y), (X[:, :1], Y)], {}, r"device 1: x has floats of shape \(n, 1\), the first"),
    "types": ([(X, Y), (X, Y * 0.5)], {}, "device 1: y has floats .*, the first one integers"),
    "ragged": (([[1.0], [1.0, 2.0]], [0, 1]), {}, "rows of x differ in length"),
    "ragged items": (Items((X[0], 0), (X[0][:1], 1)), {}, r"example 1 has shape \(1,\), example 0"),
    "key": ({"train": (X, Y), "tset": (X, Y)}, {}, "'tset' is unknown; did you mean 'test'"),
    "no train": ({"test": (X, Y)}, {}, "'train' is missing"),
    "text": (Items(("hello", 0), ("you", 1)), {}, "input of example 0 is a str; expected numbers"),
    "triples": (Items((X[0], 0, 0)), {}, "example 0 is a tuple of 3"),
    "items fail": (Items(), {}, "no examples"),
    "column": (Items({"x": X[0], "lable": 1}), {}, "no column 'label' .*did you mean 'lable'"),
    "frame column": (pd.DataFrame({"x": [1]}), {}, "no column 'label' for data.target"),
    "which input": (
        Items({"a": X[0], "b": X[0], "label": 1}),
        {},
        "the inputs would be the columns a, b; name one with data.columns",
    ),
    "missing": (([[1.0], [2.0]], [None, None]), {}, "y holds a NoneType"),
    "one class": ((X, Y * 0), {}, "every label is 0"),
}


@pytest.mark.parametrize(("given", "options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_objects_are_one_clear_line(given: Any, options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        read(given, **options)
    assert "\n" not in str(caught.value)


def test_a_dataset_that_fails_is_named() -> None:
    class Fails(Items):
        def __getitem__(self, row: int) -> Any:
            if row == 2:
                raise KeyError("lost")
            return super().__getitem__(row)

    with pytest.raises(BadInput, match="data: example 2: KeyError"):
        read(Fails(*zip(X, Y, strict=True)))


def test_a_function_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mydata.py").write_text(
        "import numpy as np\n"
        "def make(path='', seed=0):\n"
        "    return np.full((4, 2), seed), np.arange(4) % 2, path\n"
        "def pair(seed): return np.full((4, 2), 1.0 * seed), np.arange(4) % 2\n"
        "def fails(): raise OSError('disk')\n"
    )
    monkeypatch.chdir(tmp_path)
    found = load_given("mydata:pair", SourceOptions(), "", 7)
    assert found.dataset.x[0, 0] == 7
    for name, path, message in (
        ("mydata:pair", "here", "takes no path"),
        ("mydata:fails", "", "data source 'mydata:fails' failed: OSError: disk"),
        ("mydata:make", "here", "data source 'mydata:make': is a tuple"),
        ("mydata:nothing", "", "has no 'nothing'"),
        ("nomodule:make", "", "cannot import 'nomodule'"),
    ):
        with pytest.raises(BadInput, match=message):
            load_given(name, SourceOptions(), path, 1)

from typing import Any

import numpy as np
import pytest

from latecomer.data.dataset import Dataset
from latecomer.errors import BadInput

X = np.arange(8.0).reshape(4, 2)
Y = np.array([0, 1, 1, 0])
NAN, INF = float("nan"), float("inf")


def test_converts_and_names_classes() -> None:
    data = Dataset(x=X, y=Y.astype(np.uint8) * 2 + 1, subject=["b", "a", "a", "b"])
    assert data.x.dtype == np.float32
    assert data.y.dtype == np.int64
    assert data.y.tolist() == [0, 1, 1, 0]
    assert data.subject is not None
    assert data.class_names == ("1", "3")
    assert (data.num_classes, data.num_outputs, len(data)) == (2, 2, 4)


@pytest.mark.parametrize(
    ("labels", "names", "index"),
    [
        ([3, 1, 2, 3], ("1", "2", "3"), [2, 0, 1, 2]),
        ([-5, 10**12, -5, 0], ("-5", "0", "1000000000000"), [0, 2, 0, 1]),
        (["walk", "run", "run", "sit"], ("run", "sit", "walk"), [2, 0, 0, 1]),
        (np.array(["b", "a", "b", "a"], dtype=object), ("a", "b"), [1, 0, 1, 0]),
        ([b"b", b"a", b"b", b"a"], ("a", "b"), [1, 0, 1, 0]),
        ([True, False, True, True], ("False", "True"), [1, 0, 1, 1]),
        ([[3], [1], [1], [3]], ("1", "3"), [1, 0, 0, 1]),
    ],
)
def test_labels_of_any_integers_or_text_are_classes_in_ascending_order(
    labels: Any, names: tuple[str, ...], index: list[int]
) -> None:
    data = Dataset(x=X, y=labels)
    assert (data.class_names, data.y.tolist(), data.has_classes) == (names, index, True)
    assert data.y.dtype == np.int64


def test_text_labels_keep_the_order_of_given_names() -> None:
    data = Dataset(x=X, y=["run", "sit", "run", "sit"], class_names=("sit", "walk", "run"))
    assert (data.y.tolist(), data.num_classes) == ([2, 0, 2, 0], 3)


@pytest.mark.parametrize(
    ("targets", "kind", "outputs"),
    [
        (np.array([0.5, 1.5, -2.0, 1e-3]), "f", 1),
        (np.ones((4, 3)), "f", 3),
        (np.array([[0, 1], [NAN, 0], [1, 1], [NAN, NAN]]), "f", 2),
        (np.array([[True, False]] * 4), "f", 2),
        (np.array([[4, 7], [1, 1], [2, 5], [0, 3]]), "i", 8),
    ],
)
def test_other_targets_keep_their_values_and_shape(targets: Any, kind: str, outputs: int) -> None:
    data = Dataset(x=X, y=targets)
    assert (data.y.dtype.kind, data.y.dtype.itemsize) == (kind, 4 if kind == "f" else 8)
    np.testing.assert_allclose(data.y, targets)
    assert (data.has_classes, data.num_classes, data.num_outputs) == (False, 0, outputs)


def test_integer_inputs_stay_integers() -> None:
    data = Dataset(x=np.array([[1, 20]] * 4, dtype=np.int16), y=np.array([[1, 2]] * 4))
    assert (data.x.dtype, data.num_outputs) == (np.int64, 21)
    assert data.with_float_inputs().x.dtype == np.float32


def test_missing_values_are_allowed() -> None:
    assert np.isnan(Dataset(x=[[NAN, 1], [2, NAN]], y=[0, 1]).x).sum() == 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"x": X[:3]}, "x has 3 rows and y has 4"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "no examples"),
    "negative label": (
        {"y": np.array([0, 1, -2, 0]), "class_names": ("a", "b")},
        "label -2 in row 2",
    ),
    "text of no class": (
        {"y": ["a", "b", "c", "a"], "class_names": ("a", "b")},
        "label c in row 2 is out of range; allowed are a, b",
    ),
    "ragged x": ({"x": [[1.0], [2.0, 3.0], [1.0], [2.0]]}, "rows of x differ in length"),
    "ragged y": ({"y": [[1], [2, 3], [1], [2]]}, "rows of y differ in length"),
    "y of objects": ({"y": [None, "a", "b", "a"]}, "y holds a NoneType; expected numbers or text"),
    "every target missing": ({"y": np.full((4, 2), NAN)}, "every target is missing"),
    "number missing": ({"y": np.array([0.5, 1, NAN, 2])}, "target in row 2 is missing"),
    "number infinite": ({"y": np.array([[0.5], [1], [INF], [2]])}, "target in row 2 is infinite"),
    "names of numbers": (
        {"y": np.ones((4, 2)), "class_names": ("a", "b", "c")},
        "3 class_names for y of shape",
    ),
    "label too high": (
        {"y": np.array([0, 3, 1, 0]), "class_names": ("a", "b")},
        "label 3 in row 1 is out of range; allowed are 0 to 1",
    ),
    "one class": ({"y": np.ones(4, dtype=int)}, "every label is 1; expected at least 2 classes"),
    "x as text": ({"x": X.astype(str)}, "expected numbers"),
    "x flat": ({"x": X[:, 0]}, r"x has shape \(4,\)"),
    "x without features": ({"x": X[:, :0]}, "at least one feature"),
    "infinite": ({"x": np.where(X == 5, INF, X)}, "infinite .* in row 2, column 1"),
    "beyond float32": ({"x": np.where(X == 5, 1e300, X)}, "too large .* row 2, column 1"),
    "infinite image": (
        {"x": np.where(np.arange(32).reshape(4, 2, 2, 2) == 13, -INF, 0)},
        "in row 1, channel 1",
    ),
    "column missing": ({"x": np.where(X % 2 == 1, NAN, X)}, "column 1 of x is missing"),
    "channel missing": (
        {"x": np.where(np.arange(3) == 2, NAN, np.zeros((4, 5, 3)))},
        "channel 2 of x is missing",
    ),
    "all missing": ({"x": X * NAN}, "every value of x is missing"),
    "subject length": ({"subject": np.arange(3)}, r"subject has shape \(3,\)"),
    "subject not a name": ({"subject": np.full(4, NAN)}, "subject is float64"),
    "test length": ({"test": np.ones(5, dtype=bool)}, r"test has shape \(5,\)"),
    "test not bool": ({"test": np.ones(4)}, "test is float64; expected bool"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_data_is_one_clear_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        Dataset(**{"x": X, "y": Y, "where": "here.npz"} | change)
    assert str(caught.value).startswith("here.npz: ")
    assert "\n" not in str(caught.value)

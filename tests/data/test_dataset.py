from typing import Any

import numpy as np
import pytest

from latecomer.data.dataset import Dataset
from latecomer.errors import BadInput

X = np.arange(8.0).reshape(4, 2)
Y = np.array([0, 1, 1, 0])
NAN, INF = float("nan"), float("inf")


def test_converts_and_names_classes() -> None:
    data = Dataset(x=X, y=Y.astype(np.uint8) * 2, subject=["b", "a", "a", "b"])
    assert data.x.dtype == np.float32
    assert data.y.dtype == np.int64
    assert data.subject is not None
    assert data.class_names == ("0", "1", "2")
    assert (data.num_classes, len(data)) == (3, 4)


def test_missing_values_are_allowed() -> None:
    assert np.isnan(Dataset(x=[[NAN, 1], [2, NAN]], y=[0, 1]).x).sum() == 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"x": X[:3]}, "x has 3 rows and y has 4"),
    "empty": ({"x": X[:0], "y": Y[:0]}, "no examples"),
    "negative label": ({"y": np.array([0, 1, -2, 0])}, "label -2 in row 2"),
    "label too high": (
        {"y": np.array([0, 3, 1, 0]), "class_names": ("a", "b")},
        "label 3 in row 1 is out of range; allowed are 0 to 1",
    ),
    "an id as label": ({"y": np.array([0, 1, 10**12, 0])}, "label 1000000000000 in row 2"),
    "labels not integers": ({"y": np.array([0.0, 1.0, 0.5, 1.0])}, "y is float64; labels must be"),
    "labels as text": ({"y": np.array(["a", "b", "a", "b"])}, "labels must be integers"),
    "labels one-hot": ({"y": np.eye(4, dtype=int)}, r"y has shape \(4, 4\)"),
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

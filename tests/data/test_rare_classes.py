import numpy as np
import pytest

from latecomer.data.dataset import Dataset, drop_rare_classes
from latecomer.errors import BadInput

DATA = Dataset(
    x=np.arange(6, dtype=np.float32)[:, None],
    y=np.array([0, 0, 1, 2, 2, 2]),
    subject=np.array([1, 1, 1, 2, 2, 2]),
    test=np.arange(6) % 2 == 0,
    class_names=("sit", "run", "walk"),
)


def test_rare_classes_are_dropped_and_labels_stay_consecutive() -> None:
    left = drop_rare_classes(DATA, 2)
    assert left.class_names == ("sit", "walk")
    assert left.y.tolist() == [0, 0, 1, 1, 1]
    assert left.x[:, 0].tolist() == [0, 1, 3, 4, 5]
    assert left.notes == ("classes of fewer than 2 examples are dropped: run (1)",)


def test_without_rare_classes_the_dataset_is_unchanged() -> None:
    assert drop_rare_classes(DATA, 0) is DATA
    assert drop_rare_classes(DATA, 1) is DATA


def test_at_least_two_classes_stay() -> None:
    with pytest.raises(BadInput, match=r"data\.min_examples = 3"):
        drop_rare_classes(DATA, 3)

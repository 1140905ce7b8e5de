"""Metrics against scikit-learn, and by hand."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

from latecomer.study.metrics import class_scores, confusion

CLASSES = 6

pairs = st.lists(
    st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=60
)


@given(pairs)
def test_equal_to_scikit_learn(both: list[tuple[int, int]]) -> None:
    truth, predicted = (list(column) for column in zip(*both, strict=True))
    found = class_scores(confusion(torch.tensor(truth), torch.tensor(predicted), CLASSES), 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are predicted and absent
        balanced = balanced_accuracy_score(truth, predicted)
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, predicted))
    assert found["balanced_accuracy"] == pytest.approx(balanced)
    assert found["macro_f1"] == pytest.approx(f1_score(truth, predicted, average="macro"))
    seen = sorted({*truth, *predicted})
    by_class = dict(zip(seen, f1_score(truth, predicted, average=None), strict=True))
    for label, value in enumerate(found.f1):
        if label in by_class:
            assert value == pytest.approx(by_class[label])
        else:
            assert value is None
    assert found["loss"] == 0.5
    assert found["accuracy_affected"] is None


def test_confusion_has_rows_of_targets() -> None:
    counts = confusion(torch.tensor([0, 0, 1]), torch.tensor([1, 0, 1]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]


def test_late_class_accuracy_by_hand() -> None:
    truth = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2])
    predicted = torch.tensor([0, 1, 1, 1, 0, 2, 0, 0, 0])
    counts = confusion(truth, predicted, 4)
    assert class_scores(counts, 0.0, (1,))["accuracy_affected"] == pytest.approx(2 / 3)
    # 2 of the 3 of class 1, and 1 of the 4 of class 2: not the mean of the two shares.
    assert class_scores(counts, 0.0, (1, 2))["accuracy_affected"] == pytest.approx(3 / 7)
    assert class_scores(counts, 0.0, (3,))["accuracy_affected"] is None
    assert class_scores(counts, 0.0, (2, 3))["accuracy_affected"] == pytest.approx(1 / 4)

"""Logistic regression with SGDClassifier; the rows are split by the size of the tumour."""

from functools import cache

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from sklearn.preprocessing import StandardScaler

CLASSES = np.array([0, 1])


@cache
def load_data(partition_id: int, num_partitions: int):
    """The training and test rows of a node: (x, y), (x, y)."""
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    # Half of the rows by the radius of the tumour, half at random: nodes differ.
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(y))
    half = len(y) // 2
    order = np.concatenate([shuffled[:half], shuffled[half:][np.argsort(x[shuffled[half:], 0])]])
    rows = np.concatenate(
        [
            np.array_split(order[:half], num_partitions)[partition_id],
            np.array_split(order[half:], num_partitions)[partition_id],
        ]
    )
    rows = rng.permutation(rows)
    held = max(1, len(rows) // 5)
    return (x[rows[held:]], y[rows[held:]]), (x[rows[:held]], y[rows[:held]])


def new_model(penalty: str) -> SGDClassifier:
    """A model with zero weights; SGDClassifier draws the order of the rows from numpy."""
    model = SGDClassifier(loss="log_loss", penalty=penalty, learning_rate="constant", eta0=0.01)
    model.classes_ = CLASSES
    model.coef_ = np.zeros((1, 30))
    model.intercept_ = np.zeros(1)
    return model


def get_params(model: SGDClassifier) -> list[np.ndarray]:
    return [model.coef_, model.intercept_]


def set_params(model: SGDClassifier, params: list[np.ndarray]) -> SGDClassifier:
    model.coef_, model.intercept_ = params[0].copy(), params[1].copy()
    return model

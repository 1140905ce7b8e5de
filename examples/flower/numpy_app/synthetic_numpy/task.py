"""Softmax regression on data that numpy generates.

After Synthetic(alpha, beta) of Li et al., FedProx (MLSys 2020), with a model that the nodes share.
"""

from functools import cache

import numpy as np

FEATURES, CLASSES = 60, 10


@cache
def node_data(partition_id: int, alpha: float, beta: float):
    """The training and test examples of a node: (x, y), (x, y)."""
    rng = np.random.default_rng([1, partition_id])
    scale = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)
    mean = scale * rng.normal(0, np.sqrt(beta), FEATURES)
    shared = np.random.default_rng(0).normal(size=(FEATURES, CLASSES))
    weight = shared + rng.normal(0, np.sqrt(alpha), (FEATURES, CLASSES))
    count = min(400, int(rng.lognormal(4, 1)) + 50)
    x = mean + scale * rng.normal(size=(count, FEATURES))
    y = np.argmax(x @ weight, axis=1)
    held = count // 5
    return (x[held:], y[held:]), (x[:held], y[:held])


def initial_model() -> dict[str, np.ndarray]:
    """Zeros; `steps` counts the mini-batches that the model has seen."""
    return {
        "weight": np.zeros((FEATURES, CLASSES)),
        "bias": np.zeros(CLASSES),
        "steps": np.zeros(1, dtype=np.int64),
    }


def loss_and_accuracy(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray):
    probabilities = _softmax(x @ model["weight"] + model["bias"])
    loss = -np.log(probabilities[np.arange(len(y)), y] + 1e-12).mean()
    return float(loss), float((probabilities.argmax(1) == y).mean())


def train(
    model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray, epochs: int, lr: float
) -> dict[str, np.ndarray]:
    """The model after mini-batch gradient descent in an order that numpy draws."""
    weight, bias, steps = model["weight"].copy(), model["bias"].copy(), model["steps"].copy()
    for _ in range(epochs):
        for batch in np.array_split(np.random.permutation(len(y)), max(1, len(y) // 20)):
            error = _softmax(x[batch] @ weight + bias)
            error[np.arange(len(batch)), y[batch]] -= 1
            weight -= lr * x[batch].T @ error / len(batch)
            bias -= lr * error.mean(0)
            steps += 1
    return {"weight": weight, "bias": bias, "steps": steps}


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)

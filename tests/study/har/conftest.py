"""A dataset of six subjects with three activities, small enough for a study in seconds."""

from pathlib import Path

import numpy as np
import pytest

from latecomer.study.config import Tree

PEOPLE, CLASSES, EACH = 6, 3, 60


@pytest.fixture(scope="session")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The features of each subject are shifted by a random offset; class 2 is rare."""
    rng = np.random.default_rng(0)
    y = rng.choice(CLASSES, size=PEOPLE * EACH, p=[0.5, 0.4, 0.1])
    subject = np.repeat(np.arange(PEOPLE), EACH)
    x = rng.normal(size=(len(y), 5)) + 2 * np.eye(5)[y] + rng.normal(size=(PEOPLE, 5))[subject]
    x[rng.random(x.shape) < 0.05] = np.nan
    path = tmp_path_factory.mktemp("people") / "people.npz"
    names = np.array(["sit", "walk", "run"])
    np.savez(path, x=x.astype(np.float32), y=y, subject=subject, class_names=names)
    return path


@pytest.fixture(scope="session")
def scenario(people: Path) -> Tree:
    return {
        "data": {"source": "npz", "path": str(people), "partition": "by-subject"},
        "fleet": {"profile": "tiers"},
        "model": {"hidden": [8]},
        "training": {"local_epochs": 1, "lr": 0.1, "batch_size": 16},
        "strategy": {"name": "async-share"},
        "engine": {"kernel": "plain"},
        "stop": {"updates": 36, "patience": 20},
        "study": {
            "har": {
                "lr": [0.1],
                "batch_size": [],
                "augment": ["none", "balanced"],
                "optimizer": ["sgd", "adam"],
                "adam_lr": [],
                "mixing": [0.2],
                "server_delay": [0, 5],
                "strategies": ["fedasync"],
            }
        },
    }

"""Tiny runs: 10 devices, a small network, a second of work at most."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latecomer.study.config import Config, Tree, parse, with_settings
from latecomer.study.runner import start_run

TINY: Tree = {
    "seed": 1,
    "data": {"source": "digits", "partition": "dirichlet", "alpha": 0.5},
    "fleet": {"devices": 10, "profile": "uniform"},
    "model": {"hidden": [8]},
    "training": {"local_epochs": 1, "lr": 0.1},
    "strategy": {"name": "fedasync"},
    "stop": {"updates": 60},
}

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="session")
def tiny_tree() -> Tree:
    return TINY


@pytest.fixture(scope="session")
def tiny() -> MakeConfig:
    """The tiny config with `--set` style changes."""

    def make(*settings: str) -> Config:
        return parse(with_settings(TINY, settings))

    return make


@pytest.fixture(scope="module")
def start(tiny: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Run the tiny config with changes in a new folder; gives the folder and the summary."""

    def go(*settings: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("tiny") / "run"
        return folder, start_run(tiny(*settings), folder)

    return go

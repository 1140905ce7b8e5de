"""Test data change reported scores and nothing else: not one bit of a model or of a decision.

Runs are repeated with the same training and validation data and other test parts. Parameters and
output bias of every personalised model, the event log, early stopping and the final model must be
bit-identical; the reported scores must not, or the test parts were never evaluated.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from latecomer.core.messages import ServingSettings
from latecomer.core.params import digest
from latecomer.data.federated_dataset import Examples, FederatedDataset
from latecomer.data.sources import load_dataset
from latecomer.device.personalisation import Personalised, personalise
from latecomer.study import evaluate, local_data
from latecomer.study.config import Config
from latecomer.study.experiment import Experiment
from latecomer.study.runner import start_run

MakeConfig = Callable[..., Config]
Poison = Callable[[Examples], Examples]

# What is computed from test data, and wall-clock time.
SCORES = {"loss", "accuracy", "balanced_accuracy", "macro_f1", "accuracy_affected"}
REPORTED = SCORES | {"f1", "wall_seconds", "worst_client"}
REPORTED |= {"client_accuracy", "client_balanced_accuracy", "client_macro_f1"}


def other_labels(test: Examples) -> Examples:
    return Examples(test.x, (test.y + 1) % 10)


def no_features(test: Examples) -> Examples:
    return Examples(torch.full_like(test.x, torch.nan), test.y)


def one_class(test: Examples) -> Examples:
    """Half of the examples, all of one class: other label frequencies and another number."""
    kept = (len(test.y) + 1) // 2
    return Examples(-test.x[:kept], torch.full_like(test.y[:kept], 7))


POISONS = (other_labels, no_features)
ALWAYS = ["evaluate.clients=true", "evaluate.every=40"]


def poisoned(data: FederatedDataset, poison: Poison) -> FederatedDataset:
    clients = tuple(replace(client, test=poison(client.test)) for client in data.clients)
    return replace(data, clients=clients, test=poison(data.test))


class Run:
    """A run whose test data are replaced after the training data have been taken."""

    def __init__(self, config: Config, folder: Path, poison: Poison | None = None) -> None:
        self.personalised: list[tuple[ServingSettings, str, list[float]]] = []
        federate = local_data.federate

        def replaced(*args: Any, **kwargs: Any) -> FederatedDataset:
            data = federate(*args, **kwargs)
            return data if poison is None else poisoned(data, poison)

        def traced(network: Any, params: Tensor, settings: ServingSettings, *rest: Any) -> Any:
            found: Personalised = personalise(network, params, settings, *rest)
            bias = found.output_bias.tolist()
            self.personalised.append((settings, digest([found.params]), bias))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_data, "federate", replaced)
            patch.setattr(evaluate, "personalise", traced)
            self.summary = start_run(config, folder)
        self.events = [json.loads(line) for line in (folder / "events.jsonl").open()]
        self.table = pd.read_csv(folder / "metrics.csv")

    def decisions(self) -> dict[str, Any]:
        """Everything in the summary that is not a score on test data."""
        found = {name: value for name, value in self.summary.items() if name not in REPORTED}
        if found["best"] is not None:
            found["best"] = {n: v for n, v in found["best"].items() if n not in SCORES}
        return found

    def validation(self) -> list[list[float]]:
        columns = [name for name in self.table if name.startswith("validation_")]
        return self.table[["updates", "version", "virtual_seconds", *columns]].to_numpy().tolist()


PERSONALISED = ["personalise.prior=true", "personalise.finetune_epochs=1"]
SKEWED = ["data.alpha=0.1", "fleet.devices=20", "fleet.profile=tiers", "stop.updates=120"]
LATE = ["fleet.late.classes=[5]", "fleet.late.devices=2", "fleet.late.delay=3"]
RUNS = {
    "latecomer": ["strategy.name=latecomer", *SKEWED, *LATE, *PERSONALISED],
    "fedavg": ["strategy.name=fedavg", *PERSONALISED],
    "drift": [
        "strategy.name=latecomer",
        "data.drift.kind=shift",
        "data.drift.begin=4",
        *PERSONALISED,
    ],
    "sub-models": ["strategy.name=latecomer", "submodels.level=declared"],
    "privacy": ["strategy.name=latecomer", "privacy.epsilon=20.0"],
    "clusters": ["strategy.name=echopfl", "stop.updates=120", *PERSONALISED],
    "compensation": ["strategy.name=feddc-fedbuff", *LATE],
    "selection by loss": ["strategy.name=oort"],
    "held-out devices": ["data.test=held-out-clients", "data.scale=local"],
    "early stopping": ["stop.updates=2000", "stop.patience=3", "evaluate.every=5"],
}


@pytest.fixture(scope="module")
def clean(tiny: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run of that name with its own test data; each is made once."""

    @cache
    def make(name: str) -> Run:
        return Run(tiny(*ALWAYS, *RUNS[name]), tmp_path_factory.mktemp("clean") / "run")

    return make


@pytest.mark.parametrize(
    ("name", "poison"),
    [*(("latecomer", poison) for poison in POISONS), *((name, one_class) for name in RUNS)],
)
def test_models_and_decisions_do_not_depend_on_test_data(
    tiny: MakeConfig, clean: Callable[[str], Run], tmp_path: Path, name: str, poison: Poison
) -> None:
    without = clean(name)
    found = Run(tiny(*ALWAYS, *RUNS[name]), tmp_path / "run", poison)
    assert found.personalised == without.personalised
    assert found.events == without.events
    assert found.validation() == without.validation()
    assert found.decisions() == without.decisions()
    # The test parts were replaced, and are what the scores are computed on.
    for score in ("loss", "client_accuracy"):
        assert found.summary[score] != without.summary[score]
        assert found.table[score].tolist() != without.table[score].tolist()


def test_the_runs_above_personalise_and_stop_early(clean: Callable[[str], Run]) -> None:
    run = clean("latecomer")
    assert all(settings.finetune_epochs == 1 for settings, _, _ in run.personalised)
    assert any(settings.class_prior and any(bias) for settings, _, bias in run.personalised)
    # With one set of parameters for all devices it would be one per evaluation.
    assert len({params for _, params, _ in run.personalised}) > len(run.table)
    assert clean("early stopping").summary["ended_by"] == "patience"


@pytest.mark.parametrize("augment", ["none", "balanced"])
@pytest.mark.parametrize("scale", ["global", "local"])
def test_scaling_and_augmentation_do_not_depend_on_features_of_test_rows(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, scale: str, augment: str
) -> None:
    config = tiny(f"data.scale={scale}", f"data.augment={augment}")
    clients = Experiment(config).federation.clients
    rows = torch.cat([client.test_rows for client in clients]).numpy()

    def changed(*args: Any) -> Any:
        dataset = load_dataset(*args)
        x = dataset.x.copy()
        x[rows] = 100 - 3 * x[rows]
        return replace(dataset, x=x)

    monkeypatch.setattr(local_data, "load_dataset", changed)
    for client, other in zip(clients, Experiment(config).federation.clients, strict=True):
        assert torch.equal(client.train.x, other.train.x)
        assert torch.equal(client.validation.x, other.validation.x)
        assert torch.equal(client.test_rows, other.test_rows)
        assert not len(client.test.y) or not torch.equal(client.test.x, other.test.x)

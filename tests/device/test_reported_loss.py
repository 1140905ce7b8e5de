"""The loss a device reports before it trains, if its task asks for it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.messages import MAIN, Task, TrainSpec, Update
from latecomer.device import client as client_module
from latecomer.device import training
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.release import release
from latecomer.device.training import loss_rms

MODEL = flat_model("mlp", (6,), 3)
X, Y = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
ASKED = TrainSpec(report_loss=True)


def task(spec: TrainSpec = ASKED, seed: int = 0) -> Task:
    return Task(9, 2, 0, MAIN, 0, spec, MODEL.init(seed))


def test_by_hand() -> None:
    """Logits (0, x ln 3): the losses of x = 0 and x = 1 for class 0 are ln 2 and ln 4."""
    model = FlatModel(lambda: nn.Linear(1, 2), (1,), 2)
    params = torch.tensor([0.0, math.log(3.0), 0.0, 0.0])
    loss = loss_rms(model, params, torch.tensor([[0.0], [1.0]]), torch.tensor([0, 0]))
    assert loss == pytest.approx(math.sqrt((math.log(2) ** 2 + math.log(4) ** 2) / 2))


def test_it_is_that_of_the_model_that_was_sent() -> None:
    update = Client(2, MODEL, X, Y, seed=5).perform(task())
    assert dict(update.metrics) == {"loss_rms": loss_rms(MODEL, MODEL.init(0), X, Y)}
    assert type(update.metrics["loss_rms"]) is float


def test_it_does_not_change_the_training() -> None:
    client = Client(2, MODEL, X, Y, seed=5)
    asked, not_asked = client.perform(task()), client.perform(task(TrainSpec()))
    assert asked.delta is not None
    assert not_asked.delta is not None
    assert torch.equal(asked.delta, not_asked.delta)
    assert dict(not_asked.metrics) == {}


def test_large_data_are_passed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loss_rms(MODEL, MODEL.init(0), X, Y)
    monkeypatch.setattr(training, "MAX_EXAMPLES_AT_ONCE", 3)
    assert loss_rms(MODEL, MODEL.init(0), X, Y) == pytest.approx(whole)


def test_it_leaves_through_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(update: Update) -> Update:
        return release(replace(update, metrics={}))

    monkeypatch.setattr(client_module, "release", strict)
    assert not Client(2, MODEL, X, Y, seed=5).perform(task()).metrics

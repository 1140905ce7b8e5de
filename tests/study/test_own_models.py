"""What devices make of a model, measured on their own data."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from latecomer.core.submodel import take
from latecomer.device.personal import class_offset
from latecomer.study.config import Config
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment

MakeConfig = Callable[..., Config]


class Own:
    """Everything about it is known."""

    def __init__(self, keep: float, mix: float, changes: dict[int, Tensor]) -> None:
        self.keep, self.mix, self.changes = keep, mix, changes

    def change(self, device: int) -> Tensor | None:
        return self.changes.get(device)

    def expected(self, devices: object, classes: int) -> Tensor | None:
        return None


@pytest.fixture(params=["none", "declared"])
def experiment(tiny: MakeConfig, request: pytest.FixtureRequest) -> Experiment:
    return Experiment(tiny(f"submodels.level={request.param}"))


def measured(experiment: Experiment, own: Own | None) -> dict[int, float]:
    server = experiment.server()
    server.strategy = replace(server.strategy, own=own)
    return dict(Evaluator(experiment).on_devices(server).each)


def test_where_nothing_is_kept_and_no_mix_allowed_for_it_is_the_model_as_sent(
    experiment: Experiment,
) -> None:
    changes = {0: torch.ones(experiment.model.layout.size)}
    assert measured(experiment, Own(0.0, 0.0, changes)) == measured(experiment, None)


def test_a_device_is_measured_with_its_own_change_and_its_own_mix(experiment: Experiment) -> None:
    server = experiment.server()
    head = server.store.head_params()
    changes = {
        device: torch.randn(take(head, server.carries(device)).numel())
        for device in range(1, len(experiment.clients))
    }
    found = measured(experiment, Own(0.5, 1.0, changes))
    for device in (0, 1, 2):  # the first has never been heard
        submodel = server.carries(device)
        network = experiment.networks(submodel)
        assert network is not None
        test, labels = experiment.test_of(device), experiment.train_of(device).y
        params = take(head, submodel)
        if device:
            params = params + 0.5 * changes[device]
        with torch.no_grad():
            logits = network.logits(params, test.x) + class_offset(labels, 10)
        right = (logits.argmax(1) == test.y).double().mean().item()
        assert found[device] == pytest.approx(right)

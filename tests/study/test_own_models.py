"""What devices make of a model, measured on their own data."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from latecomer.core.strategy import ServerView
from latecomer.core.submodel import take
from latecomer.device.flat import FlatModel
from latecomer.device.personal import class_offset
from latecomer.strategies.labels import output_bias
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

    def calibrated(self, lineage: str, view: ServerView) -> Tensor:
        return view.store.head_params(lineage)

    def expected(self, devices: object, classes: int) -> Tensor | None:
        return None


class Always(Own):
    """Calibrated so that only one class is ever said."""

    def __init__(self, network: FlatModel, said: int) -> None:
        super().__init__(0.0, 0.0, {})
        self.place, self.said = output_bias(network), said

    def calibrated(self, lineage: str, view: ServerView) -> Tensor:
        assert self.place is not None
        moved = view.store.head_params(lineage).clone()
        moved[self.place.start + self.said] += 1e6
        return moved


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


def test_it_is_the_calibrated_model_that_is_measured(experiment: Experiment) -> None:
    server = experiment.server()
    server.strategy = replace(server.strategy, own=Always(experiment.model, said=3))
    test = experiment.central_test()
    central = Evaluator(experiment).central(server)
    assert central.accuracy == pytest.approx((test.y == 3).double().mean().item())
    each = Evaluator(experiment).on_devices(server).each
    right = {d: (experiment.test_of(d).y == 3).double().mean().item() for d in each}
    assert each == pytest.approx(right)

"""What devices make of a model, measured on their own data."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from latecomer.core.strategy import ServerView
from latecomer.core.submodel import take
from latecomer.data.federated_dataset import Examples
from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import prior_shift
from latecomer.strategies.parts.labels import output_bias
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

    def as_sent(self, lineage: str, view: ServerView) -> Tensor:
        return self.calibrated(lineage, view)

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
    return dict(Evaluator(experiment).local_test(server).each)


def test_where_nothing_is_kept_and_no_mix_allowed_for_it_is_the_model_as_sent(
    experiment: Experiment,
) -> None:
    changes = {0: torch.ones(experiment.model.layout.size)}
    assert measured(experiment, Own(0.0, 0.0, changes)) == measured(experiment, None)


def learnt(network: FlatModel, params: Tensor, data: Examples) -> Tensor:
    """What training on its examples changes."""
    found = params.clone()
    for _ in range(20):
        at = found.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(network.logits(at, data.x), data.y), at)
        found -= 0.1 * gradient
    return found - params


def test_a_device_is_measured_with_its_own_change_and_its_own_mix(experiment: Experiment) -> None:
    server = experiment.server()
    head = server.store.head_params()
    changes = {}
    for device in range(1, len(experiment.clients)):  # the first has never been heard
        submodel = server.submodel_of(device)
        network = experiment.networks(submodel)
        assert network is not None
        changes[device] = learnt(network, take(head, submodel), experiment.train_of(device))
    found, kept = measured(experiment, Own(0.5, 1.0, changes)), 0
    for device, accuracy in found.items():
        submodel = server.submodel_of(device)
        network = experiment.networks(submodel)
        assert network is not None
        test, train = experiment.test_of(device), experiment.train_of(device)
        sent, offset = take(head, submodel), prior_shift(train.y, 10)
        change = changes.get(device, torch.zeros(len(sent)))
        tried = [sent + share * change for share in (0.0, 0.125, 0.25, 0.5)]
        with torch.no_grad():
            wrong = [
                int(((network.logits(params, train.x) + offset).argmax(1) != train.y).sum())
                for params in tried
            ]
            logits = network.logits(tried[wrong.index(min(wrong))], test.x) + offset
        kept += min(wrong) < wrong[0]
        right = (logits.argmax(1) == test.y).double().mean().item()
        assert accuracy == pytest.approx(right)
    assert kept  # of some device


def test_an_old_change_that_would_do_harm_is_left_out(experiment: Experiment) -> None:
    server = experiment.server()
    head = server.store.head_params()
    harm = {
        device: torch.full_like(take(head, server.submodel_of(device)), torch.nan)
        for device in range(len(experiment.clients))
    }
    assert measured(experiment, Own(1.0, 0.0, harm)) == measured(experiment, None)


def test_it_is_the_calibrated_model_that_is_measured(experiment: Experiment) -> None:
    server = experiment.server()
    server.strategy = replace(server.strategy, own=Always(experiment.model, said=3))
    test = experiment.central_test()
    central = Evaluator(experiment).central(server)
    assert central.accuracy == pytest.approx((test.y == 3).double().mean().item())
    each = Evaluator(experiment).local_test(server).each
    right = {d: (experiment.test_of(d).y == 3).double().mean().item() for d in each}
    assert each == pytest.approx(right)

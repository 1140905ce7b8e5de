"""Central, validation and local test scores, worked out by hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from latecomer.core.messages import Joined, ServingSettings, TrainSpec
from latecomer.core.server import Server
from latecomer.core.strategy import Observer, ServerView
from latecomer.core.submodel import take
from latecomer.data.federated_dataset import Examples
from latecomer.device.flat import FlatModel
from latecomer.device.personalisation import personalise, prior_shift, subsample
from latecomer.strategies.parts.labels import output_bias
from latecomer.strategies.parts.personalisation import personalised
from latecomer.study import evaluate
from latecomer.study.config import Config
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment
from latecomer.study.metrics import OverDevices, Scores, over_devices
from latecomer.study.scoring import Scoring

MakeConfig = Callable[..., Config]
NETWORK = FlatModel(lambda: nn.Linear(1, 2), (1,), 2)  # two weights, then two biases
UP = torch.tensor([0.0, 1.0, 0.0, 0.0])  # logits (0, x): class 1 where x > 0
DOWN = -UP
NOTHING = ServingSettings()
SPEC = TrainSpec(local_epochs=9, batch_size=32, lr=0.2, momentum=0.0)
DRIFT = 0.5  # the virtual time from which labels are swapped


def examples(x: Sequence[float], y: Sequence[int]) -> Examples:
    return Examples(torch.tensor(x).reshape(-1, 1), torch.tensor(y, dtype=torch.int64))


NONE = examples([], [])
# (train, test) of each device. Device 2 has no test part, device 3 no training part.
DEVICES = (
    (examples([-1.0, 1.0], [1, 0]), examples([-1.0, 1.0, 2.0, 3.0], [0, 1, 1, 0])),
    (examples([-1.0] * 20, [1] * 20), examples([-1.0, -2.0], [1, 1])),
    (examples([1.0], [1]), NONE),
    (NONE, examples([1.0], [1])),
)
CENTRAL = examples([-1.0, 1.0, 1.0], [0, 1, 0])
VALIDATION = examples([-2.0, 2.0], [0, 0])


def at(data: Examples, time: float) -> Examples:
    return data if time < DRIFT else Examples(data.x, 1 - data.y)


def doubled_rate(spec: TrainSpec) -> TrainSpec:
    return replace(spec, lr=2 * spec.lr)


@dataclass
class FakeExperiment:
    """What `Evaluator` reads of an experiment: four devices, three of them late."""

    max_examples: int = 0
    batching_problem: str | None = None
    devices: Any = DEVICES
    fleet: Any = field(default_factory=lambda: SimpleNamespace(late=frozenset({1, 2, 3})))
    model: FlatModel = NETWORK
    spec: TrainSpec = SPEC
    strategy: Any = field(default_factory=lambda: SimpleNamespace(prepare=doubled_rate))

    def __post_init__(self) -> None:
        clients = [SimpleNamespace(train=train, test=test) for train, test in self.devices]
        self.federation = SimpleNamespace(clients=clients)
        self.scoring = Scoring(self.model.objective, (1,))
        self.resolution = SimpleNamespace(batching_problem=self.batching_problem)
        self.config = SimpleNamespace(
            evaluate=SimpleNamespace(examples=self.max_examples),
        )

    @property
    def data(self) -> "FakeExperiment":
        return self

    def networks(self, submodel: object) -> FlatModel:
        return self.model

    def train_of(self, device: int, time: float = 0.0) -> Examples:
        return at(self.devices[device][0], time)

    def test_of(self, device: int, time: float = 0.0) -> Examples:
        return at(self.devices[device][1], time)

    def central_test(self, time: float) -> Examples:
        return at(CENTRAL, time)

    def validation(self, time: float) -> Examples:
        return at(VALIDATION, time)


@dataclass
class FakeServer:
    """A model per lineage, used with the same settings on all devices."""

    models: dict[str, Tensor]
    assigned: dict[int, str] = field(default_factory=dict)
    settings: ServingSettings = NOTHING

    @property
    def store(self) -> Any:
        return SimpleNamespace(head_params=self.model)

    def lineage_of(self, device: int) -> str:
        return self.assigned.get(device, "main")

    def submodel_of(self, device: int) -> None:
        return None

    def model(self, lineage: str) -> Tensor:
        return self.models[lineage]

    def serving_settings(self, lineage: str) -> ServingSettings:
        return self.settings


def evaluator(**changes: Any) -> Evaluator:
    return Evaluator(FakeExperiment(**changes))  # type: ignore[arg-type]


def one_model(settings: ServingSettings = NOTHING) -> Any:
    return FakeServer({"main": UP}, settings=settings)


def test_local_test_accuracy_without_personalisation() -> None:
    """Device 0 has 3 of 4 right, device 1 none of 2, device 3 one of 1."""
    found = evaluator().local_test(one_model())
    assert found.each == {0: 0.75, 1: 0.0, 3: 1.0}
    assert found.mean == pytest.approx(1.75 / 3)
    assert (found.worst, found.worst_device) == (0.0, 1)
    assert found.late_mean == 0.5  # devices 1 and 3; device 2 is late and has no test part
    # Recalls of device 0: 1/2 and 2/2. F1 of its classes: 2/3 and 4/5.
    assert found.further["balanced_accuracy"] == OverDevices(pytest.approx(1.75 / 3), 0.0)
    assert found.further["macro_f1"] == OverDevices(pytest.approx((11 / 15 + 0 + 1) / 3), 0.0)


def test_the_label_shift_correction_is_by_the_training_labels() -> None:
    """Device 1 trains on class 1 alone: its logits gain log(0.05 / 20.1 * 2) and log(20.05 ...).

    Device 0 is balanced and device 3 has no training examples: nothing is corrected there.
    """
    shift = prior_shift(torch.ones(20, dtype=torch.int64), 2)
    assert shift.tolist() == pytest.approx([math.log(0.1 / 20.1), math.log(40.1 / 20.1)])
    found = evaluator().local_test(one_model(ServingSettings(prior=True)))
    assert found.each == {0: 0.75, 1: 1.0, 3: 1.0}  # at x = -2: 0 - 5.3 against -2 + 0.7
    assert found.late_mean == 1.0


@pytest.mark.parametrize(("prior", "accuracy"), [((), 1.0), ((0.25, 0.75), 0.0)])
def test_the_correction_is_relative_to_the_class_prior_of_the_model(
    prior: tuple[float, ...], accuracy: float
) -> None:
    """A quarter and three quarters: up to log 3 = 1.1 for class 1 if the model is for halves."""
    mine = (examples([-1.0] * 20, [0] * 5 + [1] * 15), examples([-0.5], [1]))
    settings = ServingSettings(prior=True, class_prior=prior)
    found = evaluator(devices=(DEVICES[0], mine)).local_test(one_model(settings))
    assert found.each[1] == accuracy


@pytest.mark.parametrize("epochs", [1, 2])
def test_devices_fine_tune_the_model_with_the_program_of_the_strategy(epochs: int) -> None:
    """Device 0 has two examples, (-1, 1) and (1, 0), both wrong by a margin of 1.

    A step of rate r with the gradient (p, -p), p = 1 / (1 + e^-1), at x = 1 for class 0, and the
    reverse at x = -1, moves the weights by r (p, -p): the margin at x is 2 r p x - x. Biases stay.
    The rate is 0.2 and `prepare` doubles it: 0.58 x - x after one epoch, still wrong. The second
    has p = 1 / (1 + e^-0.415) = 0.602, in all 1.07 x - x: right on the training examples.
    """
    settings = ServingSettings(finetune_epochs=epochs)
    found = evaluator().local_test(one_model(settings)).each
    assert found[0] == (0.75 if epochs == 1 else 0.25)
    assert found[3] == 1.0  # it has no training examples


def test_fine_tuning_is_of_each_device_alone() -> None:
    """The model of device 1, which learns class 1 alone, is not that of device 0."""
    found = evaluator().local_test(one_model(ServingSettings(finetune_epochs=20))).each
    assert found == {0: 0.25, 1: 1.0, 3: 1.0}
    assert UP.tolist() == [0.0, 1.0, 0.0, 0.0]


def test_devices_are_tested_with_the_model_of_their_cluster() -> None:
    server: Any = FakeServer({"a": UP, "b": DOWN}, {0: "a", 1: "b", 2: "a", 3: "b"})
    assert evaluator().local_test(server).each == {0: 0.75, 1: 1.0, 3: 0.0}


@pytest.mark.parametrize("settings", [NOTHING, ServingSettings(finetune_epochs=2)])
def test_local_data_are_those_of_the_time(settings: ServingSettings) -> None:
    """Labels are swapped: the training examples of device 0 are right without fine-tuning."""
    found = evaluator().local_test(one_model(settings), DRIFT)
    assert found.each == {0: 0.25, 1: 1.0, 3: 0.0}


def cross_entropy(*margins: float) -> float:
    """The mean loss of examples whose own class is ahead by these margins."""
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / len(margins)


CLUSTERS = ({"a": UP, "b": DOWN}, {0: "a", 1: "a", 2: "b", 3: "b"})


class Unbatchable(nn.Linear):
    """Raises under vmap, because its control flow depends on the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.weight.sum() < 1e9 else x


@pytest.mark.parametrize("batched", [True, False])
def test_central_scores_count_a_model_by_the_training_devices_of_its_cluster(
    batched: bool,
) -> None:
    """Two devices of model a, with 2 of 3 right, and one of model b, with 1 of 3 right."""
    server: Any = FakeServer(*CLUSTERS)
    other = {
        "model": FlatModel(lambda: Unbatchable(1, 2), (1,), 2),
        "batching_problem": "it branches",
    }
    found = evaluator(**({} if batched else other)).central(server)
    assert found["accuracy"] == pytest.approx(5 / 9)
    loss = (2 * cross_entropy(1, 1, -1) + cross_entropy(-1, -1, 1)) / 3
    assert found["loss"] == pytest.approx(loss)
    assert found["accuracy_affected"] == pytest.approx(2 / 3)
    assert evaluator().central(server, DRIFT)["accuracy"] == pytest.approx(4 / 9)


def test_validation_scores_are_those_of_the_validation_parts() -> None:
    found = evaluator().validation(one_model())
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(cross_entropy(2, -2))
    assert evaluator().validation(one_model(), DRIFT)["accuracy"] == 0.5
    server: Any = FakeServer(*CLUSTERS)
    assert evaluator().validation(server)["accuracy"] == pytest.approx(3 / 6)


@pytest.mark.parametrize("max_examples", [1, 2, 3, 10])
def test_at_most_so_many_central_examples_are_used(max_examples: int) -> None:
    x, y = subsample(CENTRAL.x, CENTRAL.y, max_examples)
    assert len(y) == min(max_examples, 3)
    found = evaluator(max_examples=max_examples).central(one_model())
    right = ((x[:, 0] > 0).long() == y).double().mean().item()
    assert found["accuracy"] == pytest.approx(right)


class Recorded(FlatModel):
    """Records the batch sizes of its forward passes."""

    sizes: ClassVar[list[int]] = []

    def logits(self, params: Tensor, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return super().logits(params, x)


def test_many_models_and_many_examples_are_evaluated_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five models, two at a time, with two examples at a time."""
    monkeypatch.setattr(evaluate, "MAX_MODELS_AT_ONCE", 2)
    monkeypatch.setattr(evaluate, "MAX_EXAMPLES_AT_ONCE", 4)
    models = {str(i): torch.tensor([0.0, 1.0, 0.0, 0.6 - i]) for i in range(5)}
    # Model i predicts class 1 where x > i - 0.6. Devices 0 to 4 have one each.
    devices = [(examples([1.0], [1]), examples([3.0, 0.0, 0.0], [1, 0, 1]))] * 5
    server: Any = FakeServer(models, {i: str(i) for i in range(5)})
    recorded = Recorded(lambda: nn.Linear(1, 2), (1,), 2)
    found = evaluator(devices=devices, model=recorded)
    # Central x = -1, 1, 1 with y = 0, 1, 0: 2 right for i = 0 and 1, 2 right beyond that as well.
    assert found.central(server)["accuracy"] == pytest.approx(2 / 3)
    assert recorded.sizes == [2, 1] * 3
    assert found.central(server)["accuracy_affected"] == pytest.approx(2 / 5)
    # Local x = 3, 0, 0 with y = 1, 0, 1: i = 0 has 2 right, 1 to 3 have 2, 4 has 1.
    each = found.local_test(server).each
    assert list(each.values()) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2 / 3, 1 / 3])
    recorded.sizes.clear()
    one: Any = FakeServer({"main": UP})
    assert found.local_test(one).mean == pytest.approx(2 / 3)  # 15 examples of five devices
    assert recorded.sizes == [4, 4, 4, 3]


def of(accuracy: float) -> Scores:
    values = {"accuracy": accuracy, "balanced_accuracy": accuracy / 2, "macro_f1": accuracy / 4}
    return Scores(values)


def test_scores_over_devices() -> None:
    each = {4: of(0.5), 2: of(0.25), 7: of(0.25), 1: of(1.0)}
    found = over_devices(each, late=(7, 9, 1), further=("balanced_accuracy", "macro_f1"))
    assert (found.mean, found.worst, found.worst_device) == (0.5, 0.25, 2)  # the first of the worst
    assert found.late_mean == 0.625
    assert found.further == {
        "balanced_accuracy": OverDevices(0.25, 0.125),
        "macro_f1": OverDevices(0.125, 0.0625),
    }
    assert found.each == {4: 0.5, 2: 0.25, 7: 0.25, 1: 1.0}


def test_without_devices_there_are_no_scores() -> None:
    found = over_devices({}, late=(1,), further=("macro_f1",))
    assert (found.mean, found.worst, found.late_mean, found.worst_device) == (None,) * 4
    assert found.further == {"macro_f1": OverDevices(None, None)}
    assert over_devices({1: of(0.5)}, late=()).late_mean is None


# The same on an experiment, with sub-models and a real server.


class AlwaysOneClass(Observer):
    """The deployed model always predicts one class."""

    def __init__(self, network: FlatModel, predicted: int) -> None:
        self.bias, self.predicted = output_bias(network), predicted

    def deployed(self, params: Tensor, lineage: str, view: ServerView) -> Tensor:
        assert self.bias is not None
        moved = params.clone()
        moved[self.bias.start + self.predicted] += 1e6
        return moved


@pytest.fixture(params=["none", "declared"])
def experiment(tiny: MakeConfig, request: pytest.FixtureRequest) -> Experiment:
    return Experiment(tiny(f"submodels.level={request.param}"))


def with_tasks(experiment: Experiment) -> Server:
    """A server that has given every device a task, with the sub-model of the device."""
    server = experiment.server()
    server.handle(*(Joined(device) for device in experiment.clients))
    submodels = {server.submodel_of(device) for device in experiment.clients}
    assert (len(submodels) > 1) == (experiment.config.submodels.level == "declared")
    return server


def by_hand(experiment: Experiment, server: Server, settings: ServingSettings) -> dict[int, float]:
    """Accuracy of the personalised sub-model of each device on its test part."""
    found = {}
    for device in experiment.clients:
        test, train = experiment.data.test_of(device), experiment.data.train_of(device)
        submodel = server.submodel_of(device)
        network = experiment.networks(submodel)
        assert network is not None
        sent = take(server.store.head_params(), submodel)
        spec = experiment.strategy.prepare(experiment.spec)
        params, bias = personalise(network, sent, settings, spec, train.x, train.y)
        with torch.no_grad():
            logits = network.logits(params, test.x) + bias
        if len(test.y):
            found[device] = (logits.argmax(1) == test.y).double().mean().item()
    return found


@pytest.mark.parametrize("epochs", [0, 2])
def test_every_device_personalises_its_sub_model(experiment: Experiment, epochs: int) -> None:
    experiment.strategy = personalised(experiment.strategy, True, epochs)
    server = with_tasks(experiment)
    settings = ServingSettings(True, epochs)  # nobody has reported class shares yet
    assert server.serving_settings("main") == settings
    each = Evaluator(experiment).local_test(server).each
    assert each == pytest.approx(by_hand(experiment, server, settings))
    assert each != by_hand(experiment, server, NOTHING)


def test_the_deployed_model_is_evaluated(experiment: Experiment) -> None:
    always = AlwaysOneClass(experiment.model, predicted=3)
    experiment.strategy = replace(experiment.strategy, observers=(always,))
    server = with_tasks(experiment)
    test = experiment.data.central_test()
    central = Evaluator(experiment).central(server)
    assert central["accuracy"] == pytest.approx((test.y == 3).double().mean().item())

"""Buffers on devices, broadcasts and own training give the models of virtual time.

study/test_every_kind.py has every kind of network.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import own_training
from fake_grid import FakeTransport
from kinds_of_networks import FEATURES, KINDS
from latecomer.core.messages import Task, TrainSpec
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import Buffers, FlatModel
from latecomer.device.networks import Networks
from latecomer.device.own_training import TrainFunction
from latecomer.engines.agent import Agent
from latecomer.engines.deployment_loop import DeploymentLoop
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.strategies.recipe import build_strategy
from toy import EXAMPLES, toy_fleet

SPEC = TrainSpec(local_epochs=2, batch_size=8, lr=0.05)
DEVICES, UPDATES = 5, 12
LOCAL = [("batchnorm", "local", "fedasync")]
BROADCAST = [("both", "average", "echopfl"), ("spectral", "average", "echopfl")]


class Timed(OneByOne):
    """Every task takes as long as on the fake transport."""

    def examples(self, task: Task) -> float:
        return EXAMPLES


def data_of(device: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(device)
    x = torch.randn(20 + device, FEATURES, generator=g)
    return x, torch.randint(0, 10, (len(x),), generator=g)


def model_of(kind: str, buffers: Buffers) -> FlatModel:
    return FlatModel(KINDS[kind], (FEATURES,), 10, buffers=buffers, seed=3)


def server_of(model: FlatModel, strategy: str) -> Server:
    return Server(
        model.init(3), build_strategy(strategy, {}), SPEC, seed=3, networks=Networks(model)
    )


@pytest.mark.parametrize(("kind", "buffers", "strategy"), [*LOCAL, *BROADCAST])
def test_devices_and_simulation_agree_to_the_bit(
    kind: str, buffers: Buffers, strategy: str, tmp_path: Path
) -> None:
    agree(kind, buffers, strategy, tmp_path)


def test_a_training_function_gives_the_same_on_devices(tmp_path: Path) -> None:
    agree("both", "average", "echopfl", tmp_path, own_training.train)


def agree(
    kind: str,
    buffers: Buffers,
    strategy: str,
    tmp_path: Path,
    train: TrainFunction | None = None,
) -> None:
    """The models of a deployment equal those of the simulation."""
    agents = [
        Agent(
            f"toy-{i}",
            model_of(kind, buffers),
            lambda i=i: data_of(i),
            tmp_path / str(i),
            train=train,
        )
        for i in range(DEVICES)
    ]
    model = model_of(kind, buffers)
    # A device counts as number 0 of its own seed.
    clients = {
        i: Client(0, model, *data_of(i), agents[i].seed, train=train) for i in range(DEVICES)
    }
    virtual = server_of(model, strategy)
    engine = VirtualEngine(virtual, toy_fleet(DEVICES), Timed(clients), range(DEVICES))
    engine.run(Bounds(UPDATES), lambda: True)

    def node(agent: Agent):
        return lambda kind, payload: agent.introduce() if kind == "query" else agent.answer(payload)

    transport = FakeTransport(toy_fleet(DEVICES), {i: node(a) for i, a in enumerate(agents)})
    real = server_of(model_of(kind, buffers), strategy)
    assert DeploymentLoop(real, transport).run(Bounds(UPDATES)) == "updates"
    assert not torch.equal(virtual.model(), model.init(3))
    for lineage in virtual.store.lineages:
        assert torch.equal(virtual.model(lineage), real.model(lineage))
    assert virtual.model().numel() == model.layout.size

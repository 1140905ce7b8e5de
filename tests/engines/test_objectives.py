"""With targets of every kind the deployment loop gives the models of the virtual engine."""

import pytest
import torch

from fake_grid import FakeTransport
from latecomer.core.messages import TrainSpec
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.engines.deployment_loop import DeploymentLoop
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.engines.wire import Introduction, decode_task, encode_introduction, encode_update
from latecomer.strategies.recipe import build_strategy
from problems import KINDS, a_problem
from toy import toy_fleet

SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.05)
SHARE = 8  # examples of a device


def setting(kind):
    """The clients of five devices, and a server."""
    model, x, y = a_problem(kind)
    parts = zip(torch.split(x, SHARE), torch.split(y, SHARE), strict=True)
    clients = {i: Client(i, model, *part, seed=7) for i, part in enumerate(parts)}
    server = Server(
        model.init(1), build_strategy("latecomer"), SPEC, seed=7, networks=clients[0].networks
    )
    return model, clients, server


class Node:
    """Device `number` behind a node: trains with its client."""

    def __init__(self, number, client):
        self.number, self.client = number, client

    def __call__(self, kind, payload):
        if kind == "query":
            return encode_introduction(Introduction(f"device-{self.number}", f"key {self.number}"))
        size = self.client.networks.whole.layout.size
        order = decode_task(payload, lambda name: (None, size))
        return encode_update(self.client.perform(order.task), order.key)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_and_the_virtual_engine_agree_to_the_bit(kind):
    _, clients, virtual = setting(kind)
    engine = VirtualEngine(virtual, toy_fleet(), OneByOne(clients), list(clients))
    engine.run(Bounds(30), lambda: True)
    model, clients, real = setting(kind)
    nodes = {i: Node(i, client) for i, client in clients.items()}
    assert DeploymentLoop(real, FakeTransport(toy_fleet(), nodes)).run(Bounds(30)) == "updates"
    assert torch.equal(real.model(), virtual.model())
    assert not torch.equal(real.model(), model.init(1))

"""Every kernel reports the same loss, and with each of them Oort of all devices is FedAvg."""

import pytest
import torch

from latecomer.core.messages import TrainSpec
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.device.kernel import CompiledKernel, compiled_kernel
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.fleet.fleet import make_fleet
from latecomer.strategies.recipe import build_strategy

DEVICES = 8
SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.1)


def run(kernel, strategy, **options):
    """The heads after 60 updates, and every loss that was reported."""
    model = flat_model("mlp", (16,), 3, (8,))
    if kernel == "compiled":
        found = compiled_kernel(model)
        if not isinstance(found, CompiledKernel):
            pytest.skip(found)
        model.kernel = found
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for device in range(DEVICES):
        x = torch.randn(device + 3, 16, generator=generator)
        y = torch.randint(0, 3, (device + 3,), generator=generator)
        clients[device] = Client(device, model, x, y, seed=5)
    trainer = Batched(clients, 5) if kernel == "batched" else OneByOne(clients)
    losses = {}
    update = trainer.update

    def watched(task):
        result = update(task)
        losses[task.id] = dict(result.metrics)
        return result

    trainer.update = watched
    server = Server(model.init(0), build_strategy(strategy, options), SPEC)
    engine = VirtualEngine(server, make_fleet("tiers", DEVICES, seed=2), trainer, clients)
    engine.run(Bounds(updates=60), lambda: True)
    return server.store.head_params(), losses


@pytest.mark.parametrize("kernel", ["plain", "batched", "compiled"])
def test_oort_of_all_is_fedavg(kernel):
    plain, silent = run(kernel, "fedavg")
    ours, losses = run(kernel, "oort", fraction=1.0)
    assert torch.equal(plain, ours)
    assert not any(silent.values())
    assert all(0 < metrics["loss_rms"] < 10 for metrics in losses.values())


@pytest.mark.parametrize("kernel", ["batched", "compiled"])
def test_the_losses_are_the_same(kernel):
    _, plain = run("plain", "oort", fraction=1.0)
    _, ours = run(kernel, "oort", fraction=1.0)
    assert plain.keys() == ours.keys()
    for task, metrics in plain.items():
        assert ours[task]["loss_rms"] == pytest.approx(metrics["loss_rms"], rel=1e-4)

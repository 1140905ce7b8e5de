"""ClusterFL: everybody's model is mixed from those with like outputs."""

import math

import pytest
import torch
from torch import nn

from latecomer.core.messages import Arrived, Joined, Send, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.engines.trainers import OneByOne
from latecomer.strategies.papers.clusterfl import OutputSimilarity, mixing
from latecomer.strategies.recipe import build_strategy
from toy import SIZE, ToyRun, toy_fleet, toy_server


def test_mixing_by_hand():
    """Two alike (divergence 0) and one apart by 3.

    Centred by the mean row (1, 1, 2): (-1, -1, 1), (-1, -1, 1), (2, 2, -2). Inner products 3 among
    the first two, -6 across, 12 for the third with itself.
    """
    divergences = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, 3.0], [3.0, 3.0, 0.0]])
    expected = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    assert mixing(divergences).tolist() == expected


def test_where_all_are_alike_everybody_gets_the_mean():
    assert mixing(torch.zeros(4, 4)).tolist() == [[0.25] * 4] * 4


def test_divergence_by_hand():
    """Outputs that do not hang on the input: biases log 3 apart, temperature 1.

    p = (3/4, 1/4), q = (1/4, 3/4): KL = 3/4 log 3 + 1/4 log 1/3 = 1/2 log 3.
    """
    one = torch.tensor([0.0, 0, 0, 0, math.log(3.0), 0.0])
    two = torch.tensor([0.0, 0, 0, 0, 0.0, math.log(3.0)])
    found = OutputSimilarity(1.0, 8).divergences([one, two], toy_server("clusterfl"))
    half = 0.5 * math.log(3.0)
    assert found.flatten().tolist() == pytest.approx([0.0, half, half, 0.0], abs=1e-6)


def test_a_round_mixes_by_likeness():
    """Devices 0 and 1 answer with the same model, device 2 with another."""
    server = toy_server("clusterfl")
    tasks = [c.task for c in server.handle(*map(Joined, range(3))) if isinstance(c, Send)]
    deltas = [torch.zeros(SIZE), torch.zeros(SIZE), torch.tensor([0.0, 0, 0, 0, 5, 0])]
    deltas[0][0], deltas[1][0] = 0.1, 0.1
    server.handle(*(Arrived(t.device, Update(t.id, deltas[t.device], 1)) for t in tasks))
    heads = [server.store.head_params(f"device-{d}") for d in range(3)]
    assert heads[0].tolist() == pytest.approx(deltas[0].tolist())
    assert heads[1].tolist() == pytest.approx(deltas[0].tolist())
    assert heads[2].tolist() == pytest.approx(deltas[2].tolist())


def test_without_a_network_to_run_it_is_a_plain_average():
    server = Server(torch.zeros(SIZE), build_strategy("clusterfl"), TrainSpec())
    tasks = [c.task for c in server.handle(Joined(0), Joined(1)) if isinstance(c, Send)]
    server.handle(
        *(Arrived(t.device, Update(t.id, torch.full((SIZE,), 2.0 * t.device), 1)) for t in tasks)
    )
    assert server.store.head_params("device-0").tolist() == [1.0] * SIZE
    assert server.store.head_params("device-1").tolist() == [1.0] * SIZE


def test_two_worlds_keep_apart_and_help_their_own():
    model = FlatModel(lambda: nn.Linear(2, 2), (2,), 2)
    clients = {}
    for device in range(6):
        x = torch.randn(12, 2, generator=torch.Generator().manual_seed(device))
        y = (x[:, 0] > 0).long()
        clients[device] = Client(device, model, x, y if device % 2 else 1 - y, 5)
    server = Server(
        model.init(3),
        build_strategy("clusterfl"),
        TrainSpec(lr=0.5),
        networks=lambda submodel: model,
    )
    ToyRun(server, toy_fleet(6), trainer=OneByOne(clients)).until(60)
    mixed = OutputSimilarity(6.0, 64)
    shares = mixing(
        mixed.divergences(
            [server.store.head_params(server.lineage_of(d)) for d in range(6)], server
        )
    )
    across = shares[::2, 1::2].sum() + shares[1::2, ::2].sum()
    assert across < 0.05 * shares.sum()
    for device, client in clients.items():
        logits = model.logits(server.store.head_params(server.lineage_of(device)), client.x)
        assert (logits.argmax(1) == client.y).float().mean() > 0.8

"""The asynchronous baseline of the HAR paper by hand, and the strategies it is a limit of."""

import pytest
import torch

from latecomer.core.messages import Arrived, Joined, Send, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.strategies.papers.async_share import async_share
from latecomer.strategies.recipe import build_strategy


def test_each_update_counts_by_its_share_of_the_examples() -> None:
    """Eq. 2 as it is meant: x <- x + mixing * (n_i / N) * delta_i, however stale."""
    server = Server(torch.zeros(1), async_share(mixing=0.5), TrainSpec())
    tasks = [c.task for c in server.handle(Joined(0), Joined(1)) if isinstance(c, Send)]
    server.handle(Arrived(0, Update(tasks[0].id, torch.tensor([4.0]), 30)))
    # The other is not heard of yet and counts as this one: 0.5 * 1/2 * 4.
    assert server.store.head_params().item() == pytest.approx(1.0)
    server.handle(Arrived(1, Update(tasks[1].id, torch.tensor([-8.0]), 10)))
    # Now 10 of 40 examples: 0.5 * 1/4 * -8, although it is stale by one.
    assert server.store.head_params().item() == pytest.approx(0.0)


def test_paflm_that_sends_everything_is_the_same() -> None:
    heads = []
    for strategy in (
        async_share(mixing=0.7),
        build_strategy("paflm", {"threshold": 0.0, "alpha": 1.0, "server_lr": 0.7}),
    ):
        server = Server(torch.zeros(1), strategy, TrainSpec())
        tasks = [c.task for c in server.handle(Joined(0), Joined(1)) if isinstance(c, Send)]
        for task, size in zip(tasks, (3, 9), strict=True):
            server.handle(Arrived(task.device, Update(task.id, torch.tensor([2.0]), size)))
        heads.append(server.store.head_params().item())
    assert heads[0] == pytest.approx(heads[1])

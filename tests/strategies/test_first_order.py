"""Hand-worked expansions, and the limit in which nothing is compensated."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.papers.first_order import taylor
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def test_the_expansion_by_hand():
    found = taylor(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 0.25, 0.0]), lam=0.5)
    # 1 - 0.5 * 1 * 0.5, and -2 - 0.5 * 4 * 0.25, and what did not move
    assert found.tolist() == [0.75, -2.5, 3.0]


def test_a_correction_is_at_most_as_large_as_the_delta():
    huge = torch.tensor([1e30, 1e30])
    assert taylor(huge, torch.tensor([1.0, -1.0]), lam=4.0).tolist() == [0.0, huge[0].item() * 2]


def test_a_late_update_is_brought_to_the_head():
    server = Server(
        torch.zeros(1), build_strategy("first-order", {"lam": 0.25, "quorum": 0.5}), TrainSpec()
    )
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    (fast,) = sends(server.handle(answer(fast, 1.0)))
    assert server.store.head_params().item() == 1.0  # on time: as it is
    server.handle(answer(slow, 2.0), answer(fast, 0.0))
    # The model has moved by 1 since: 2 - 0.25 * 4 * 1 = 1, averaged with 0.
    assert server.store.head_params().item() == 1.5


def test_drift_is_the_movement_since_the_base_wherever_the_model_is():
    server = Server(
        torch.full((1,), 3.0),
        build_strategy("first-order", {"lam": 0.25, "quorum": 0.5}),
        TrainSpec(),
    )
    fast, slow = sends(server.handle(Joined(0), Joined(1)))
    (fast,) = sends(server.handle(answer(fast, 1.0)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0))
    assert server.store.head_params().item() == 3.0 + 1.5  # as from 0


def test_with_a_submodel_only_its_coordinates_count():
    server = Server(
        torch.zeros(2), build_strategy("first-order", {"lam": 0.25, "quorum": 0.5}), TrainSpec()
    )
    second = Submodel("second", torch.tensor([1]))
    fast, slow = sends(server.handle(Joined(0), Joined(1, second)))
    (fast,) = sends(server.handle(answer(fast, 5.0, 1.0)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0, 0.0))
    assert server.store.head_params().tolist() == [5.0, 1.5]


def test_without_lambda_it_is_semi_async_bit_for_bit():
    ours, plain = toy_run("first-order", 80, lam=0.0), toy_run("semi-async", 80)
    assert ours.heads() == plain.heads()
    assert max(f["staleness"] for _, f in ours.lines("arrival")) > 0
    assert toy_run("first-order", 80).heads() != plain.heads()


def test_a_bad_option_is_named():
    with pytest.raises(BadInput, match="lam"):
        build_strategy("first-order", {"lam": -1.0})

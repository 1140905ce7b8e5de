"""Hand-worked predictions, the bounded memory, and the limit in which nothing is compensated."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def answer(task, *delta, examples=1):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), examples))


def begun(*moves, window=1):
    """A server of two devices whose model has moved by these; both were sent the last version."""
    server = Server(
        torch.zeros(1),
        build_strategy("w-pred", {"lam": 0.25, "window": window, "quorum": 0.5}),
        TrainSpec(),
    )
    tasks = sends(server.handle(Joined(0), Joined(1)))
    for move in moves:
        tasks = sends(server.handle(*(answer(task, move) for task in tasks)))
    return server, *tasks


def test_the_prediction_follows_the_movement_at_the_time_of_sending():
    server, fast, slow = begun(1.0)
    (fast,) = sends(server.handle(answer(fast, 0.5)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0))
    # Predicted is a move by 1, as before (in truth it was 0.5): 2 - 0.25 * 4 * 1 = 1.
    assert server.store.head_params().item() == 1.5 + (0 + 1) / 2


def test_it_goes_as_far_as_the_delay_is_long():
    server, fast, slow = begun(0.5)
    for move in (0.5, 0.0, 0.0):
        (fast,) = sends(server.handle(answer(fast, move)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0))
    # 3 commits late: 2 - 0.25 * 4 * (3 * 0.5) = 0.5.
    assert server.store.head_params().item() == 1.0 + (0 + 0.5) / 2


@pytest.mark.parametrize(("window", "movement"), [(1, 0.5), (2, 1.0), (3, 1.0), (9, 1.0)])
def test_the_movement_is_the_mean_of_the_last_commits(window, movement):
    server, fast, slow = begun(1.0, 1.5, 0.5, window=window)
    (fast,) = sends(server.handle(answer(fast, 0.0)))
    server.handle(answer(slow, 1.0), answer(fast, 0.0))
    assert server.store.head_params().item() == 3.0 + (1 - 0.25 * movement) / 2


def test_before_the_first_movement_nothing_is_predicted():
    server, fast, slow = begun()
    (fast,) = sends(server.handle(answer(fast, 1.0)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0))
    assert server.store.head_params().item() == 2.0


def test_with_a_submodel_only_its_coordinates_count():
    server = Server(
        torch.zeros(2), build_strategy("w-pred", {"lam": 0.25, "quorum": 0.5}), TrainSpec()
    )
    second = Submodel("second", torch.tensor([1]))
    fast, slow = sends(server.handle(Joined(0), Joined(1, second)))
    fast, slow = sends(server.handle(answer(fast, 9.0, 1.0), answer(slow, 1.0)))
    (fast,) = sends(server.handle(answer(fast, 0.0, 0.0)))
    server.handle(answer(slow, 2.0), answer(fast, 0.0, 0.0))
    assert server.store.head_params().tolist() == [9.0, 1.5]


def test_a_movement_is_kept_for_each_version_in_use_and_no_other():
    run = toy_run("w-pred", 300)
    kept = run.server.strategy.compensate.state()["movement"]
    assert set(kept) <= set(run.server.store.versions)
    assert len(kept) <= 5


def test_without_lambda_it_is_semi_async_bit_for_bit():
    ours, plain = toy_run("w-pred", 80, lam=0.0), toy_run("semi-async", 80)
    assert ours.heads() == plain.heads()
    assert toy_run("w-pred", 80).heads() != plain.heads()


@pytest.mark.parametrize(("option", "value"), [("lam", -0.1), ("window", 0), ("window", 1.5)])
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("w-pred", {option: value})

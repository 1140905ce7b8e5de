"""Hand-worked distances and numbers of local epochs."""

import pytest
import torch

from commands import sends
from latecomer.core.messages import Arrived, Joined, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.papers.asyncfeded import asyncfeded
from latecomer.strategies.recipe import build_strategy
from toy import toy_run


def answer(task, *delta):
    return Arrived(task.device, Update(task.id, torch.tensor(delta), 1))


def begun(submodel=None, **options):
    server = Server(torch.zeros(2), asyncfeded(**options), TrainSpec(local_epochs=2))
    return server, *sends(server.handle(Joined(0), Joined(1, submodel)))


def test_the_weight_by_hand():
    server, fast, slow = begun(lam=1.0, eps=2.0)
    server.handle(answer(fast, 3.0, 4.0))
    assert server.store.head_params().tolist() == [1.5, 2.0]  # nothing moved since: 1 / 2
    server.handle(answer(slow, 0.0, 5.0))
    # |(1.5, 2)| / |(0, 5)| = 0.5: 1 / 2.5
    assert server.store.head_params().tolist() == pytest.approx([1.5, 4.0])


def test_only_the_coordinates_of_a_sub_model_count():
    server, fast, slow = begun(Submodel("second", torch.tensor([1])), lam=1.0, eps=2.0)
    server.handle(answer(fast, 9.0, 4.0))
    server.handle(answer(slow, 4.0))  # |2| / |4| = 0.5
    assert server.store.head_params().tolist() == pytest.approx([4.5, 3.6])


def test_an_empty_update_is_no_division_by_zero():
    server, fast, slow = begun()
    server.handle(answer(fast, 1.0, 1.0))
    before = server.store.head_params().clone()
    server.handle(answer(slow, 0.0, 0.0))
    assert torch.equal(server.store.head_params(), before)


@pytest.mark.parametrize(
    ("gamma_bar", "kappa", "most", "fresh", "stale"),
    [
        (2.0, 2.0, 10, 6, 5),  # 2 + 2 * 2, and 2 + 2 * (2 - 0.5)
        (2.0, 2.0, 4, 4, 4),
        (0.0, 8.0, 10, 2, 1),  # 2 - 8 * 0.5, but at least one
        (0.75, 2.0, 10, 4, 2),  # 2 + 1.5 and 2 + 0.5 are rounded to even
        (2.0, 0.0, 10, 2, 2),
    ],
)
def test_fresh_ones_train_longer_next_time(gamma_bar, kappa, most, fresh, stale):
    options = {"gamma_bar": gamma_bar, "kappa": kappa, "max_epochs": most}
    server, fast, slow = begun(lam=1.0, eps=2.0, **options)
    assert {fast.spec.local_epochs, slow.spec.local_epochs} == {2}
    (fast,) = sends(server.handle(answer(fast, 3.0, 4.0)))
    (slow,) = sends(server.handle(answer(slow, 0.0, 5.0)))
    assert (fast.spec.local_epochs, slow.spec.local_epochs) == (fresh, stale)
    assert server.store.head_params().tolist() == pytest.approx([1.5, 4.0])


def test_without_a_change_of_epochs_nothing_else_changes():
    paced = toy_run("asyncfeded", 60, kappa=1.0)  # the toy devices do not look at their epochs
    plain = toy_run("asyncfeded", 60)
    assert paced.heads() == plain.heads()
    assert len({task.spec.local_epochs for task in paced.server.open_tasks.values()}) > 1


def test_a_bad_option_is_named():
    with pytest.raises(BadInput, match="eps"):
        build_strategy("asyncfeded", {"eps": 0.0})

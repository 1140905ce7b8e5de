import pytest
import torch

from latecomer.core.messages import MAIN, Task, TrainSpec, Update
from latecomer.device import client as client_module
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.device.release import release
from latecomer.device.training import local_update, plan_batches, task_rng
from latecomer.errors import BadInput

SPEC = TrainSpec(batch_size=4)
MODEL = flat_model("mlp", (6,), 3)
X, Y = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3


def task(number: int = 0, device: int = 2) -> Task:
    return Task(9, device, number, MAIN, 0, SPEC, MODEL.init(0))


def test_the_update_is_what_training_changed() -> None:
    update = Client(2, MODEL, X, Y, seed=5).perform(task(number=3))
    plan = plan_batches(10, SPEC, task_rng(5, 2, 3))
    trained = local_update(MODEL, MODEL.init(0), X, Y, SPEC, plan)
    assert update.delta is not None
    assert torch.equal(update.delta, trained - MODEL.init(0))
    assert (update.task_id, update.num_examples, dict(update.metrics)) == (9, 10, {})


def test_results_do_not_depend_on_the_order_of_tasks() -> None:
    forwards, backwards = Client(2, MODEL, X, Y, seed=5), Client(2, MODEL, X, Y, seed=5)
    first = [forwards.perform(task(number)).delta for number in (0, 1)]
    second = [backwards.perform(task(number)).delta for number in (1, 0)]
    assert torch.equal(first[0], second[1])
    assert torch.equal(first[1], second[0])
    assert not torch.equal(first[0], first[1])


def test_everything_leaves_through_release(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Update] = []

    def watch(update: Update) -> Update:
        seen.append(update)
        return release(update)

    monkeypatch.setattr(client_module, "release", watch)
    assert Client(2, MODEL, X, Y, seed=5).perform(task()) is seen[0]


@pytest.mark.parametrize(("examples", "labels"), [(0, 0), (10, 9)])
def test_data_must_match(examples: int, labels: int) -> None:
    with pytest.raises(BadInput, match="device 4"):
        Client(4, MODEL, X[:examples], Y[:labels], seed=0)

import pytest
import torch

from latecomer.core.messages import TrainSpec
from latecomer.device.training import plan_batches, task_rng
from latecomer.errors import BadInput


def test_each_pass_sees_every_example_once_and_pads_the_last_batch() -> None:
    plan = plan_batches(10, TrainSpec(local_epochs=3, batch_size=4), task_rng(0, 0, 0))
    assert plan.order.shape == plan.mask.shape == (9, 4)
    assert plan.order.dtype is torch.int64
    assert plan.mask.dtype is torch.float32
    for order, mask in zip(plan.order.view(3, 12), plan.mask.view(3, 12), strict=True):
        assert sorted(order[mask > 0].tolist()) == list(range(10))
    assert plan.mask[2].tolist() == [1, 1, 0, 0]
    assert plan.order[2, 2:].tolist() == [0, 0]
    assert plan.order[:3].tolist() != plan.order[3:6].tolist()


def test_few_examples_make_a_narrow_plan() -> None:
    plan = plan_batches(3, TrainSpec(local_epochs=1, batch_size=32), task_rng(0, 0, 0))
    assert plan.order.shape == (1, 3)
    assert plan.mask.all()


def test_no_examples_is_an_error() -> None:
    with pytest.raises(BadInput, match="at least one example"):
        plan_batches(0, TrainSpec(), task_rng(0, 0, 0))


def test_a_stream_belongs_to_one_task() -> None:
    draws = {
        (seed, device, number): draw(seed, device, number)
        for seed in range(2)
        for device in range(3)
        for number in range(3)
    }
    assert len(set(draws.values())) == len(draws)
    assert draw(1, 2, 0) == draws[1, 2, 0]


def draw(seed: int, device: int, number: int) -> int:
    return int(torch.randint(2**60, (), generator=task_rng(seed, device, number)))

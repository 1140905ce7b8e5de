"""What a device remembers: each formula by hand, and that nothing changes where it is not asked."""

from dataclasses import replace

import pytest
import torch

from latecomer.core.messages import MAIN, Task, TrainSpec
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.device.memory import DeviceMemory, balanced, lazy_upload

MODEL = flat_model("mlp", (6,), 3)
X, Y = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
SPEC = TrainSpec(batch_size=4, lr=0.1)


def task(number: int = 0, spec: TrainSpec = SPEC, params: torch.Tensor | None = None) -> Task:
    return Task(number, 2, number, MAIN, 0, spec, MODEL.init(0) if params is None else params)


def values(tensor: torch.Tensor | None) -> list[float]:
    assert tensor is not None
    return [round(value, 6) for value in tensor.tolist()]


def test_the_mix_of_gradients_by_hand() -> None:
    """beta 0.5, step 0.5: gradients 2, 6 and 4 are deltas -1, -3 and -2."""
    spec, memory = TrainSpec(lr=0.5, balance=0.5), DeviceMemory()
    assert values(balanced(torch.tensor([-1.0]), spec, memory)) == [-1.0]  # h = 0.5 * 2 = 1
    # 6 - 2 + 1 = 5; then h = 0.5 * 1 + 0.5 * 6 = 3.5
    assert values(balanced(torch.tensor([-3.0]), spec, memory)) == [-2.5]
    assert values(balanced(torch.tensor([-2.0]), spec, memory)) == [-0.75]  # 4 - 6 + 3.5 = 1.5


def test_balancing_follows_a_changed_learning_rate() -> None:
    """What is kept are gradients: the second task takes steps twice as long."""
    spec, memory = TrainSpec(lr=0.5, balance=0.5), DeviceMemory()
    balanced(torch.tensor([-1.0]), spec, memory)
    # A gradient of 2 again, with steps of 1: -(2 - 2 + 1) * 1
    assert values(balanced(torch.tensor([-2.0]), replace(spec, lr_scale=2.0), memory)) == [-1.0]


def test_a_steady_gradient_is_damped_at_first_and_whole_in_the_end() -> None:
    """The first is whole; then 1 - beta^t of it: 0.5, 0.75, 0.875."""
    spec, memory, delta = TrainSpec(lr=1.0, balance=0.5), DeviceMemory(), torch.tensor([-8.0])
    assert [values(balanced(delta, spec, memory))[0] for _ in range(4)] == [-8, -4, -6, -7]


def test_little_change_beside_the_movement_stays_unsent() -> None:
    spec, memory = TrainSpec(lazy=2.0), DeviceMemory()

    def sent(delta: list[float], params: list[float]) -> torch.Tensor | None:
        return lazy_upload(torch.tensor(delta), task(0, spec, torch.tensor(params)), memory)

    assert sent([1.0, 0.0], [0.0, 0.0]) is not None  # the first is always new
    assert sent([1.0, 1.0], [0.5, 0.0]) is not None  # 1 > 2 * 0.25; it is what was sent last
    assert sent([2.0, 2.0], [1.5, 0.0]) is None  # 1 + 1 <= 2 * 1
    # The change is counted from what was sent, the movement from the task before: 1 > 2 * 0.25
    assert sent([2.0, 1.0], [2.0, 0.0]) is not None
    assert sent([2.0, 1.0], [2.0, 0.0]) is None  # nothing has changed at all


def test_an_unsent_delta_is_added_to_the_next() -> None:
    spec, memory = TrainSpec(lazy=1.0, accumulate_residual=True), DeviceMemory()

    def sent(delta: float, params: float) -> torch.Tensor | None:
        return lazy_upload(torch.tensor([delta]), task(0, spec, torch.tensor([params])), memory)

    assert values(sent(1.0, 0.0)) == [1.0]
    assert sent(1.5, 1.0) is None  # 0.25 <= 1
    assert sent(0.25, 2.0) is None  # 1.75 - 1: 0.5625 <= 1
    assert values(sent(0.5, 3.0)) == [2.25]  # 1.5 + 0.25 + 0.5: 1.5625 > 1
    assert sent(2.0, 4.0) is None  # nothing is carried twice: 2 - 2.25


def test_without_carrying_it_is_lost() -> None:
    spec, memory = TrainSpec(lazy=1.0), DeviceMemory()
    for delta, params, expected in ((1.0, 0.0, 1.0), (1.5, 1.0, None), (3.0, 2.0, 3.0)):
        found = lazy_upload(torch.tensor([delta]), task(0, spec, torch.tensor([params])), memory)
        assert found is None if expected is None else values(found) == [expected]


def test_a_device_with_another_submodel_begins_anew() -> None:
    spec, memory = (
        TrainSpec(lr=1.0, balance=0.5, lazy=100.0, accumulate_residual=True),
        DeviceMemory(),
    )
    for size in (2, 3):
        delta = torch.ones(size)
        assert torch.equal(balanced(delta, spec, memory), delta)
        assert lazy_upload(delta, task(0, spec, torch.zeros(size)), memory) is not None


@pytest.mark.parametrize("spec", [replace(SPEC, balance=0.5), replace(SPEC, lazy=1e9)])
def test_the_second_task_of_a_client_depends_on_the_first(spec: TrainSpec) -> None:
    client, memory = Client(2, MODEL, X, Y, seed=5), DeviceMemory()
    plain = [client.perform(task(number)).delta for number in (0, 1)]
    first = client.perform(task(0, spec), memory).delta
    again = client.perform(task(1, spec, MODEL.init(1)), memory).delta
    assert first is not None
    assert plain[0] is not None
    assert torch.equal(first, plain[0])
    if spec.lazy:
        assert again is None
    else:
        alone = client.perform(task(1, spec, MODEL.init(1))).delta  # as if it were the first
        assert again is not None
        assert alone is not None
        assert not torch.equal(again, alone)


def test_a_plain_task_leaves_the_memory_alone() -> None:
    memory = DeviceMemory()
    update = Client(2, MODEL, X, Y, seed=5).perform(task(), memory)
    assert update.delta is not None
    assert not memory
    assert not SPEC.needs_memory


def test_an_empty_update_has_the_number_of_examples() -> None:
    client, memory = Client(2, MODEL, X, Y, seed=5), DeviceMemory()
    spec = replace(SPEC, lazy=1e9)
    client.perform(task(0, spec), memory)
    update = client.perform(task(1, spec, MODEL.init(1)), memory)
    assert (update.task_id, update.delta, update.num_examples) == (1, None, 10)

"""Networks built in several threads at once, as by a server beside its devices."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from latecomer.device.checks import examine
from latecomer.device.flat import FlatModel
from latecomer.device.objective import classification
from latecomer.device.seeding import global_generator


class SlowlyBuilt(nn.Module):
    """Draws, waits so that another thread can come between, and draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        time.sleep(0.05)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_threads_that_build_at_once_get_the_weights_of_their_seeds() -> None:
    models = [FlatModel(SlowlyBuilt, (4,), 2) for _ in range(4)]
    alone = [model.init(seed) for seed, model in enumerate(models)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(FlatModel.init, models, range(4)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert torch.equal(before, torch.get_rng_state())


class WaitsForOthers(nn.Module):
    """Its forward draws nothing, but somebody else builds a network meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.others: list[threading.Thread] = []

    def forward(self, x: Tensor) -> Tensor:
        def build() -> None:
            with global_generator(3):
                torch.rand(1)
                time.sleep(0.1)

        self.others.append(threading.Thread(target=build))
        self.others[-1].start()
        time.sleep(0.05)
        return self.layer(x)


def test_what_others_draw_is_not_blamed_on_a_model() -> None:
    module = WaitsForOthers()
    examine(module, torch.zeros(2, 4), classification(2))
    for other in module.others:
        other.join()
    assert module.others


def test_the_generator_comes_back_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with global_generator(7):
        drawn = torch.rand(2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(7)))
    with global_generator():
        assert torch.equal(before, torch.get_rng_state())

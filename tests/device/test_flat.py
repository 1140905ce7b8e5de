import torch
from torch import Tensor, nn

from latecomer.device.flat import FlatModel, flat_model


def test_init_depends_on_the_seed_alone_and_leaves_the_generator() -> None:
    torch.manual_seed(5)
    model = flat_model("mlp", (4,), 3)
    before = torch.get_rng_state()
    first = model.init(7)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, flat_model("mlp", (4,), 3).init(7))
    assert not torch.equal(first, model.init(8))
    assert first.dtype is torch.float32
    assert first.shape == (model.layout.size,)


def test_init_is_what_the_module_itself_would_draw() -> None:
    torch.manual_seed(3)
    linear = nn.Linear(4, 2)
    vector = FlatModel(lambda: nn.Linear(4, 2), (4,), 2).init(3)
    assert torch.equal(vector, torch.cat([linear.weight.flatten(), linear.bias]))


def test_logits_are_those_of_the_module() -> None:
    model = flat_model("lenet", (1, 8, 8), 3)
    params, x = model.init(1), torch.randn(2, 1, 8, 8)
    expected = model.logits(params, x)
    model.bind(params)
    assert torch.equal(expected, model.module(x))


class Backwards(nn.Module):
    """Defines its output layer first."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(5, 2)
        self.inner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.inner(x).relu())


def test_head_is_the_layer_that_runs_last() -> None:
    assert FlatModel(Backwards, (4,), 2).head == slice(0, 12)
    mlp = flat_model("mlp", (4,), 3, hidden=(5,))
    assert mlp.head == slice(25, 43)


class Bare(nn.Module):
    """Parameters without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_module_that_is_its_own_layer() -> None:
    assert FlatModel(Bare, (4,), 2).head == slice(0, 8)

import pytest
import torch
from torch import nn

from latecomer.device.checks import Traits, examine
from latecomer.device.flat import flat_model
from latecomer.device.models import MODELS, build_model
from latecomer.device.objective import classification
from latecomer.errors import BadInput

SHAPES = [
    ("mlp", (64,)),
    ("mlp", (128, 9)),
    ("mlp", (1, 8, 8)),
    ("cnn1d", (64,)),
    ("cnn1d", (561,)),
    ("cnn1d", (128, 9)),
    ("cnn1d", (8, 3)),
    ("cnn1d", (1, 2)),
    ("lenet", (1, 28, 28)),
    ("lenet", (1, 8, 8)),
    ("lenet", (3, 32, 32)),
    ("lenet", (1, 4, 4)),
    ("lenet", (1, 12, 40)),
    ("resnet18", (1, 8, 8)),
    ("resnet18", (3, 32, 32)),
    ("resnet18", (3, 65, 65)),
]


def refusal(*args: object, **options: object) -> str:
    with pytest.raises(BadInput) as caught:
        build_model(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_model_gives_logits(name: str, shape: tuple[int, ...]) -> None:
    assert build_model(name, shape, 5, width=0.25)(torch.randn(3, *shape)).shape == (3, 5)


def test_lenet_on_mnist_is_the_classic_one() -> None:
    parameters = build_model("lenet", (1, 28, 28), 10).parameters()
    assert sum(p.numel() for p in parameters) == 61_706


@pytest.mark.parametrize("width", [0.01, 0.25, 0.5, 0.83])
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_a_narrow_model_is_a_prefix_of_the_wide_one(
    name: str, shape: tuple[int, ...], width: float
) -> None:
    wide = dict(build_model(name, shape, 5, hidden=(30, 7)).named_parameters())
    narrow = dict(build_model(name, shape, 5, hidden=(30, 7), width=width).named_parameters())
    assert list(narrow) == list(wide)
    for key, part in narrow.items():
        assert part.dim() == wide[key].dim()
        assert all(a <= b for a, b in zip(part.shape, wide[key].shape, strict=True))
    first, last = next(iter(wide)), list(wide)[-1]
    assert narrow[first].shape[1] == wide[first].shape[1]
    assert narrow[last].shape == wide[last].shape == (5,)


def test_narrow_widths_are_floors_and_never_zero() -> None:
    shapes = [p.shape for p in build_model("mlp", (4,), 2, (10, 2), width=0.25).parameters()]
    assert shapes == [(2, 4), (2,), (1, 2), (1,), (2, 1), (2,)]


@pytest.mark.parametrize("width", [0, -1, 1.5])
def test_width_is_a_share(width: float) -> None:
    assert "at most 1" in refusal("mlp", (4,), 2, width=width)


def test_a_wrong_shape_names_what_fits() -> None:
    message = refusal("lenet", (64,), 10)
    assert "lenet" in message
    assert "(64,)" in message
    assert message.endswith("use mlp or cnn1d")
    assert "at least 4x4" in refusal("lenet", (1, 3, 3), 10)
    assert refusal("cnn1d", (1, 8, 8), 10).endswith("use mlp or lenet or resnet18")


def test_an_unknown_name_gets_the_nearest_one_and_the_list() -> None:
    message = refusal("lenet5", (1, 8, 8), 10)
    assert "did you mean 'lenet'" in message
    assert all(name in message for name in MODELS)
    assert "did you mean" not in refusal("zzz", (4,), 2)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.AdaptiveAvgPool1d(2), "no parameters"),
        (nn.Linear(4, 2).requires_grad_(False), "all parameters are frozen"),
        (nn.Linear(5, 2), "forward fails on a batch of shape (2, 4)"),
        (nn.Linear(4, 3), "(n, 2)"),
        (nn.LSTM(4, 2), "gave tuple"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(module: nn.Module, words: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(BadInput) as caught:
        examine(module, torch.zeros(2, 4), classification(2))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(before, torch.get_rng_state())


def test_a_lazy_model_that_does_not_fit_is_refused() -> None:
    net = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(2))
    with pytest.raises(BadInput, match=r"forward fails on a batch of shape \(2, 4\)"):
        flat_model(net, (4,), 2)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d(), nn.Linear(3, 2))
    with pytest.raises(BadInput, match="cannot be copied; give a function that makes it"):
        flat_model(net, (4,), 2)
    assert flat_model(lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 2)), (4,), 2)


def test_dropout_that_drops_nothing_is_fine() -> None:
    module = nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 2))
    assert examine(module, torch.zeros(2, 4), classification(2)) == Traits()

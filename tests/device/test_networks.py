"""Narrower networks are corners of the whole one, and compute what is left when it is pruned."""

from itertools import count
from math import floor

import pytest
import torch
from torch import nn

from latecomer.core.submodel import Submodel, take
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.networks import Networks, build_networks
from latecomer.errors import BadInput

TABLE = (1, 0.75, 0.5, 0.25)
ZOO = [
    ("mlp", (5,), TABLE),
    ("cnn1d", (16, 3), TABLE),
    ("lenet", (1, 12, 12), TABLE),
    ("resnet18", (3, 8, 8), (1, 0.25)),
]


def corner(tensor, shape):
    return tensor[tuple(slice(size) for size in shape)]


@pytest.mark.parametrize(("name", "shape", "widths"), ZOO)
def test_narrow_parameters_are_slices_of_the_whole_ones(name, shape, widths):
    networks = build_networks(name, shape, 3, (64, 32), widths)
    assert list(networks.submodels) == list(widths)
    whole = networks.whole.init(1)
    tensors = networks.whole.layout.unflatten(whole)
    for width, submodel in networks.submodels.items():
        model = networks(submodel)
        assert model.layout == flat_model(name, shape, 3, width=width).layout
        for key, value in model.layout.unflatten(take(whole, submodel)).items():
            assert torch.equal(value, corner(tensors[key], value.shape))


@pytest.mark.parametrize(("name", "shape", "widths"), ZOO)
def test_hidden_channels_are_floor_s_d_and_nothing_else_is_pruned(name, shape, widths):
    networks = build_networks(name, shape, 3, (64, 32), widths)
    biases = [size for size, *rest in networks.whole.layout.shapes if not rest]
    for width, submodel in networks.submodels.items():
        narrow = [size for size, *rest in networks(submodel).layout.shapes if not rest]
        assert narrow[:-1] == [max(1, floor(width * size)) for size in biases[:-1]]
        assert narrow[-1] == biases[-1] == 3
        first = networks(submodel).layout.shapes[0]
        assert first[1:] == networks.whole.layout.shapes[0][1:]


def test_a_channel_is_left_of_every_layer():
    networks = build_networks("mlp", (2,), 2, (3, 8), (1, 0.3))
    shapes = networks(networks.submodels[0.3]).layout.shapes
    assert shapes == ((1, 2), (1,), (2, 1), (2,), (2, 2), (2,))


@pytest.mark.parametrize(("name", "shape", "widths"), [ZOO[0], ZOO[1], ZOO[2]])
def test_a_narrow_network_is_the_whole_one_without_the_other_channels(name, shape, widths):
    """The other channels have no effect: their outgoing weights are zero."""
    networks = build_networks(name, shape, 3, (64, 32), widths)
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    vector = networks.whole.init(3)
    for submodel in list(networks.submodels.values())[1:]:
        narrow, deaf = networks(submodel), vector.clone()
        tensors = networks.whole.layout.unflatten(deaf)
        for key, size in zip(narrow.layout.names, narrow.layout.shapes, strict=True):
            if len(size) > 1:
                tensors[key][:, size[1] :] = 0
        expected = networks.whole.logits(deaf, x)
        assert torch.allclose(narrow.logits(take(vector, submodel), x), expected, atol=1e-6)
        assert not torch.allclose(networks.whole.logits(vector, x), expected, atol=1e-3)


def test_names_and_lookup():
    networks = build_networks("mlp", (4,), 3, (8,), (0.25, 1, 0.5))
    assert {w: s and s.name for w, s in networks.submodels.items()} == {
        1: None,
        0.5: "width-0.5",
        0.25: "width-0.25",
    }
    assert networks(None) is networks.whole
    # By name: a sub-model out of a checkpoint is another object.
    again = Submodel("width-0.5", networks.submodels[0.5].index.clone())
    assert networks(again) is networks(networks.submodels[0.5]) is networks.models[1]
    assert networks(Submodel("stranger", torch.arange(3))) is None
    assert len(networks.models) == 3


def test_the_whole_alone():
    networks = Networks(flat_model("mlp", (4,), 3))
    assert networks.submodels == {1.0: None}
    assert networks.work(None) == 1.0
    assert networks.models == (networks.whole,)


def test_the_whole_is_always_in_the_table():
    networks = build_networks("mlp", (4,), 3, (8,), (0.5,))
    assert list(networks.submodels) == [1.0, 0.5]


def test_widths_that_come_to_the_same_layers_share_one_network():
    networks = build_networks("mlp", (4,), 3, (2,), TABLE)
    narrow = networks.submodels[0.75]
    assert narrow.name == "width-0.75"
    assert networks.submodels[0.5] is networks.submodels[0.25] is narrow
    assert len(networks.models) == 2


# Work


def test_work_of_an_mlp_by_hand():
    networks = build_networks("mlp", (4,), 3, (8, 8), TABLE)
    # Multiplications: 4*8 + 8*8 + 8*3 = 120; 4*6 + 6*6 + 6*3 = 78; 4*4 + 4*4 + 4*3 = 44;
    # 4*2 + 2*2 + 2*3 = 18.
    work = [networks.work(submodel) for submodel in networks.submodels.values()]
    assert work == [1.0, 78 / 120, 44 / 120, 18 / 120]
    assert networks.works == dict(
        zip(("", "width-0.75", "width-0.5", "width-0.25"), work, strict=True)
    )


def test_work_of_a_convolution_by_hand():
    def model(channels):
        return FlatModel(
            lambda: nn.Sequential(
                nn.Conv2d(1, channels, 3), nn.Flatten(), nn.Linear(4 * channels, 2)
            ),
            (1, 4, 4),
            2,
        )

    networks = Networks(model(4), {0.25: model(1)})
    # 2x2 places, 9 multiplications per channel, then 4 features per channel to 2 classes.
    assert networks.work(networks.submodels[0.25]) == (4 * 9 * 1 + 4 * 2) / (4 * 9 * 4 + 16 * 2)


@pytest.mark.parametrize(("name", "shape", "widths"), ZOO)
def test_work_falls_about_with_the_square_of_the_width(name, shape, widths):
    networks = build_networks(name, shape, 3, (64, 32), widths)
    for width, submodel in networks.submodels.items():
        # The first and the last layer are pruned on one side only, and floor() takes more.
        assert 0.75 * width**2 <= networks.work(submodel) <= width


class Scales(nn.Module):
    """No matrix product anywhere: nothing that is counted as an operation."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(int(4 * width), 2))

    def forward(self, x):
        return (x.unsqueeze(1) * self.scale).sum(1)


def test_without_anything_to_count_work_goes_by_size():
    networks = Networks(
        FlatModel(lambda: Scales(1.0), (2,), 2), {0.5: FlatModel(lambda: Scales(0.5), (2,), 2)}
    )
    assert networks.work(networks.submodels[0.5]) == 0.5


# What is refused


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ((1, 0), "width 0: must be above 0 and at most 1"),
        ((1.5, 1), "width 1.5: must be above 0 and at most 1"),
        ((1, float("nan")), "width nan: must be above 0"),
    ],
)
def test_a_bad_table_is_refused(widths, words):
    with pytest.raises(BadInput, match=words):
        build_networks("mlp", (4,), 3, (8,), widths)


def test_a_network_without_hidden_layers_cannot_be_narrow():
    with pytest.raises(BadInput, match=r"model 'mlp' at width 0\.5: nothing is pruned"):
        build_networks("mlp", (4,), 3, (), (1, 0.5))


SOURCE = """
from torch import nn

def net(hidden, classes):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))

def good(num_classes, width=1.0):
    return net(int(8 * width), num_classes)

def fixed(num_classes):
    return net(8, num_classes)

def ignores(num_classes, width=1.0):
    return net(8, num_classes)

def grows(num_classes, width=1.0):
    return net(int(8 / width), num_classes)

def shallower(num_classes, width=1.0):
    return nn.Sequential(nn.Linear(4, num_classes)) if width < 1 else net(8, num_classes)

def prunes_classes(num_classes, width=1.0):
    return net(8, int(num_classes * width))
"""
names = (f"widths_of_test_{number}" for number in count())


@pytest.fixture
def own(tmp_path, monkeypatch):
    name = next(names)
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_user_s_own_model(own):
    networks = build_networks(f"{own}:good", (4,), 2, (), (1, 0.5))
    assert networks(networks.submodels[0.5]).layout.shapes[0] == (4, 4)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("fixed", "width 0.5 needs a callable that takes width="),
        ("ignores", "at width 0.5: nothing is pruned"),
        ("grows", r"at width 0.5: parameter '0.weight' has shape \(16, 4\)"),
        (
            "shallower",
            "at width 0.5: parameter None is in the place of '2.weight' of the whole network",
        ),
        ("prunes_classes", r"at width 0.5: .*logits of shape \(n, 2\).*gave \(2, 1\)"),
    ],
)
def test_a_user_s_own_model_that_cannot_be_narrow(own, attribute, words):
    with pytest.raises(BadInput, match=words) as refused:
        build_networks(f"{own}:{attribute}", (4,), 2, (), (1, 0.5))
    assert f"model '{own}:{attribute}'" in str(refused.value)
    assert "\n" not in str(refused.value)

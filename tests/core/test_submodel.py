"""Index maps of narrower networks, written out by hand."""

import pytest
import torch
from torch import nn

from latecomer.core.params import Layout
from latecomer.core.submodel import covered, name_of, prefix, take
from latecomer.errors import BadInput


def layout(**shapes):
    return Layout(tuple(shapes), tuple(shapes.values()))


def test_a_narrow_mlp():
    whole = Layout.of(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))
    part = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    half = prefix(whole, part, "half")
    # 4x2 weights at 0, 4 biases at 8, 2x4 weights at 12, 2 biases at 20.
    assert half.index.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 16, 17, 20, 21]
    assert half.index.dtype is torch.int64
    assert (half.name, len(half.index), name_of(half)) == ("half", part.size, "half")


def test_a_narrow_convolution_before_a_linear_layer():
    """Two pixels leave each channel, and stand together when it is flattened."""
    whole = Layout.of(nn.Sequential(nn.Conv2d(1, 2, (1, 2)), nn.Flatten(), nn.Linear(4, 2)))
    part = Layout.of(nn.Sequential(nn.Conv2d(1, 1, (1, 2)), nn.Flatten(), nn.Linear(2, 2)))
    # 2x1x1x2 weights at 0, 2 biases at 4, 2x4 weights at 6, 2 biases at 14.
    assert prefix(whole, part, "").index.tolist() == [0, 1, 4, 6, 7, 10, 11, 14, 15]


def test_every_axis_counts():
    index = prefix(layout(w=(2, 3, 4)), layout(w=(2, 2, 2)), "").index
    assert index.tolist() == [0, 1, 4, 5, 12, 13, 16, 17]


def test_a_scalar_and_the_whole_are_their_own_prefix():
    both = layout(scale=(), w=(2, 3))
    assert prefix(both, both, "").index.tolist() == list(range(7))


def test_indices_increase_as_the_vector_does():
    whole, part = layout(a=(5, 7), b=(5,), c=(3, 5, 2)), layout(a=(2, 6), b=(2,), c=(3, 2, 2))
    index = prefix(whole, part, "").index
    assert (index.diff() > 0).all()
    assert 0 <= index[0] <= index[-1] < whole.size


def test_taking_is_slicing():
    whole, part = layout(a=(4, 3), b=(4,)), layout(a=(2, 3), b=(2,))
    vector = torch.randn(whole.size, generator=torch.Generator().manual_seed(1))
    tensors, narrow = whole.unflatten(vector), prefix(whole, part, "narrow")
    taken = part.unflatten(take(vector, narrow))
    assert torch.equal(taken["a"], tensors["a"][:2])
    assert torch.equal(taken["b"], tensors["b"][:2])
    assert torch.equal(vector[covered(narrow)], take(vector, narrow))


def test_the_whole_model_has_no_name_and_covers_every_coordinate():
    vector = torch.arange(3.0)
    assert name_of(None) == ""
    assert take(vector, None) is vector
    assert covered(None) == slice(None)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (layout(a=(5, 3), b=(4,)), r"'a' has shape \(5, 3\), which is no corner .* \(4, 3\)"),
        (layout(a=(4, 3), b=(4, 1)), r"'b' has shape \(4, 1\), which is no corner .* \(4,\)"),
        (layout(a=(4, 3)), "parameter None is in the place of 'b' of the whole network"),
        (layout(a=(4, 3), c=(4,)), "parameter 'c' is in the place of 'b' of the whole network"),
        (layout(b=(4,), a=(4, 3)), "parameter 'b' is in the place of 'a' of the whole network"),
        (
            layout(a=(4, 3), b=(4,), c=(1,)),
            "parameter 'c' is in the place of None of the whole network",
        ),
    ],
)
def test_what_is_no_prefix_is_refused_in_one_line(part, words):
    with pytest.raises(BadInput, match=words) as refused:
        prefix(layout(a=(4, 3), b=(4,)), part, "narrow")
    assert "\n" not in str(refused.value)

import hashlib

import pytest
import torch
from torch import nn

from latecomer.core.params import CHUNK, Layout, chunks, digest


def test_flatten_and_unflatten_are_inverse_and_share_memory():
    module = nn.Linear(3, 2)
    layout = Layout.of(module)
    assert layout.names == ("weight", "bias")
    assert layout.size == 8
    vector = layout.flatten(dict(module.named_parameters()))
    named = layout.unflatten(vector)
    assert torch.equal(named["weight"], module.weight)
    named["bias"].fill_(7)
    assert vector[layout.span("bias")].tolist() == [7, 7]


def test_spans_follow_each_other():
    layout = Layout(("a", "b", "c"), ((2, 3), (), (4,)))
    assert layout.sizes == (6, 1, 4)
    assert [layout.span(name) for name in layout.names] == [slice(0, 6), slice(6, 7), slice(7, 11)]


def test_flattened_values_are_a_float32_copy_without_gradients():
    layout = Layout(("a", "b"), ((2,), ()))
    source = {"b": torch.tensor(3, dtype=torch.int64), "a": torch.ones(2, requires_grad=True)}
    vector = layout.flatten(source)
    assert vector.tolist() == [1, 1, 3]
    assert vector.dtype == torch.float32
    assert not vector.requires_grad


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, []),
        (3, [slice(0, 3)]),
        (CHUNK, [slice(0, CHUNK)]),
        (CHUNK + 5, [slice(0, CHUNK), slice(CHUNK, CHUNK + 5)]),
    ],
)
def test_chunks_cover_a_vector_in_order(size, pieces):
    assert list(chunks(size)) == pieces


def test_digest_is_sha256_of_the_bytes_in_order():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    expected = hashlib.sha256(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()).hexdigest()
    assert digest([a, b]) == expected

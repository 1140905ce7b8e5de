import hashlib

import torch
from torch import nn

from latecomer.core.params import Layout, digest


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


def test_digest_is_sha256_of_the_bytes_in_order():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    expected = hashlib.sha256(torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()).hexdigest()
    assert digest([a, b]) == expected

"""Named arrays of any dtype: floats in a vector, integers and booleans beside it."""

import numpy as np
import pytest
import torch

from latecomer.core.arrays import ArrayLayout
from latecomer.core.messages import Arrived, Joined, Send, Update
from latecomer.errors import BadInput
from toy import SIZE, toy_server

ARRAYS = {
    "bn.running_var": np.full(2, 0.5, dtype="float32"),
    "bn.num_batches_tracked": np.array(2**40 + 1),
    "coef": np.arange(6, dtype="float64").reshape(2, 3),
    "half": np.ones(3, dtype="float16"),
    "mask": np.array([True, False]),
    "bytes": np.array([7, 255], dtype="uint8"),
    "none": np.zeros((0, 4), dtype="float32"),
    "scalar": np.array(0.25, dtype="float32"),
}


def test_arrays_come_back_in_their_dtypes_shapes_and_order():
    layout = ArrayLayout.of(ARRAYS)
    vector, others = layout.split(ARRAYS)
    assert vector.dtype == torch.float32
    assert vector.numel() == 2 + 6 + 3 + 1
    assert set(others) == {"bn.num_batches_tracked", "mask", "bytes"}
    found = layout.join(vector, others)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_statistics_are_the_last_part_of_the_vector_and_no_variance_is_negative():
    layout = ArrayLayout.of(ARRAYS)
    assert layout.layout.names[-1] == "bn.running_var"
    assert layout.layout.trained == 10
    vector, others = layout.split(ARRAYS)
    found = layout.join(vector - 1.0, others)
    assert found["bn.running_var"].tolist() == [0.0, 0.0]
    assert found["scalar"] == -0.75


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"n": np.array([1])}, "nothing to average"),
        ({"w": np.zeros(1), "text": np.array(["a"])}, "array 'text' is of <U1: allowed are"),
        ({"w": np.zeros(1), "z": np.zeros(1, dtype="complex64")}, "'z' is of complex64"),
    ],
)
def test_what_cannot_be_held_is_refused(arrays, message):
    with pytest.raises(BadInput, match=message):
        ArrayLayout.of(arrays)


def test_the_server_sends_the_unaveraged_arrays_of_the_last_accepted_update():
    server = toy_server("fedasync")
    first, last = ({"n": torch.tensor(n)} for n in (1, 2))
    server.unaveraged = first

    def tasks(commands):
        return [command.task for command in commands if isinstance(command, Send)]

    (a,), (b,) = (tasks(server.handle(Joined(d))) for d in (0, 1))
    assert a.unaveraged is first
    refused = Update(a.id, torch.full((SIZE,), float("nan")), 5, unaveraged=last)
    assert tasks(server.handle(Arrived(0, refused)))[0].unaveraged is first
    accepted = Update(b.id, torch.zeros(SIZE), 5, unaveraged=last)
    assert tasks(server.handle(Arrived(1, accepted)))[0].unaveraged is last
    other = toy_server("fedasync")
    other.restore(server.state())
    assert other.unaveraged == last

import json
from dataclasses import dataclass
from math import isnan

import pytest
import torch

from latecomer.core.codec import decode, encode, portable, storable
from latecomer.core.messages import Contribution, Ready, Task, TrainSpec, Update


def round_trip(value):
    tree, tensors = encode(value)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), storable(tensors))


def test_plain_values_keep_their_types():
    value = {"a": [1, 2.5, None, True], 3: ("x", ("y",)), "inf": float("inf")}
    assert round_trip(value) == value


def test_messages_come_back_and_shared_tensors_stay_shared():
    params = torch.randn(5)
    task = Task(1, 2, 0, "main", 3, TrainSpec(lr=0.5), params)
    update = Update(1, torch.ones(5), 7, {"loss": 0.5})
    ready = Ready(Contribution(task, update, params, update.delta, "main", 4))
    back = round_trip({"ready": ready, "head": params})
    contribution = back["ready"].contribution
    assert contribution.task.spec == TrainSpec(lr=0.5)
    assert contribution.update.metrics == {"loss": 0.5}
    assert torch.equal(contribution.base, params)
    assert contribution.base is contribution.task.params is back["head"]


def test_views_are_stored_alone():
    whole = torch.arange(100.0)
    _, tensors = encode(whole[10:20])
    stored = storable(tensors)["t0"]
    assert stored.untyped_storage().nbytes() == 40


def test_a_tensor_that_fills_its_memory_is_stored_without_a_copy():
    tensor, transposed = torch.arange(6.0), torch.arange(6.0).reshape(2, 3).T
    stored = storable({"whole": tensor, "transposed": transposed})
    assert stored["whole"] is tensor
    assert stored["transposed"].is_contiguous()
    assert torch.equal(stored["transposed"], transposed)


def test_equal_tensors_are_stored_apart_and_one_tensor_once():
    one, other = torch.ones(2), torch.ones(2)
    tree, tensors = encode([one, other, one])
    assert tree == [{"tensor": "t0"}, {"tensor": "t1"}, {"tensor": "t0"}]
    assert tensors["t0"] is one
    assert tensors["t1"] is other


def test_infinite_numbers_and_nan_are_written_as_text():
    assert encode([float("-inf"), 1.5])[0] == [{"float": "-inf"}, 1.5]
    assert isnan(round_trip(float("nan")))


def test_only_the_registered_class_of_a_name_is_known():
    @portable
    @dataclass
    class Registered:
        value: int

    assert round_trip([Registered(3)]) == [Registered(3)]
    namesake = type("Registered", (), {})
    with pytest.raises(TypeError, match="cannot hold Registered"):
        encode(namesake())


def test_unknown_types_are_refused():
    with pytest.raises(TypeError, match="cannot hold"):
        encode({"x": object()})

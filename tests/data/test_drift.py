from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latecomer.data.dataset import Dataset
from latecomer.data.drift import (
    Drift,
    client_data_streams,
    concatenate_streams,
    relabelled,
    rotated,
)
from latecomer.data.federated_dataset import Examples, FederatedDataset, federate
from latecomer.errors import BadInput

N = 50  # examples of each device


def lay_out(second: Dataset | None = None, devices: int = 4) -> FederatedDataset:
    """Example i has the value i; a device is a subject with N rows in order of time."""
    rows = devices * N
    data = Dataset(
        x=np.arange(rows, dtype=np.float32)[:, None] + np.array([[0, 0.5]], np.float32),
        y=np.arange(rows) % 5,
        subject=np.repeat(np.arange(devices), N),
    )
    return federate(
        data,
        partition="by-subject",
        devices=devices,
        alpha=1.0,
        test="fair",
        scale="none",
        augment="none",
        second_domain=second,
        seed=1,
    )


def drift(kind: str, **change: Any) -> Drift:
    return Drift(**{"kind": kind, "begin": 10.0, "end": 110.0} | change)


def values(examples: Examples) -> list[float]:
    return examples.x[:, 0].tolist()


def test_growing_data_keep_earlier_examples() -> None:
    made = lay_out()
    stream = client_data_streams(made, drift("grow", first=0.1), 1)[0]
    all_of_it = sorted(values(made.clients[0].train))
    sizes = []
    before: set[float] = set()
    for time in (0, 10, 35, 60, 110, 500):
        now = set(values(stream.train(time)))
        assert before <= now
        before = now
        sizes.append(len(now))
    assert sizes == [3, 3, 10, 18, 32, 32]
    assert sorted(before) == all_of_it
    assert values(stream.test(0)) == values(made.clients[0].test)


def test_replacing_r_examples_per_epoch() -> None:
    made = lay_out()
    stream = client_data_streams(made, drift("replace", per_second=0.5, second="rotated"), 1)[0]
    train = values(made.clients[0].train)

    def changed(time: float) -> int:
        return sum(a != b for a, b in zip(values(stream.train(time)), train, strict=True))

    assert [changed(t) for t in (0, 10, 12, 20, 73, 74, 1000)] == [0, 0, 1, 5, 31, 32, 32]
    # The device's test part is replaced at the same rate.
    test = values(made.clients[0].test)
    moved = sum(a != b for a, b in zip(values(stream.test(42)), test, strict=True))
    assert moved == len(test) // 2
    assert stream.train(42).y.tolist() == made.clients[0].train.y.tolist()


def test_replacing_with_repeat_restores_the_first_domain() -> None:
    made = lay_out()
    there = drift("replace", per_second=1.0, second="relabelled", repeat=True)
    stream = client_data_streams(made, there, 1)[0]
    train = made.clients[0].train.y
    assert stream.train(10 + 32).y.tolist() == relabelled(train, 5).tolist()
    assert (stream.train(10 + 48).y != train).sum() == 16
    assert stream.train(10 + 64).y.tolist() == train.tolist()


def test_replacing_by_another_source_keeps_the_labels() -> None:
    other = Dataset(
        x=-1 - np.arange(100, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32),
        y=np.arange(100) % 5,
    )
    made = lay_out(other)
    stream = client_data_streams(made, drift("replace", per_second=1.0, second="source"), 1)[0]
    after = stream.train(1000)
    assert after.y.tolist() == made.clients[0].train.y.tolist()
    assert (after.x < 0).all()
    # Each comes from a row of the same class, and no row is both in training and in test.
    assert [int(-1 - v) % 5 for v in values(after)] == after.y.tolist()
    assert not set(values(after)) & set(values(stream.test(1000)))


def test_a_second_domain_must_have_the_same_shape_and_classes() -> None:
    with pytest.raises(BadInput, match=r"shape \(3,\), the first of \(2,\)"):
        lay_out(Dataset(x=np.zeros((10, 3), np.float32), y=np.arange(10) % 5))
    with pytest.raises(BadInput, match="too few examples of '2'"):
        lay_out(Dataset(x=np.zeros((10, 2), np.float32), y=np.arange(10) % 2))


def test_a_transition_from_the_earlier_half_to_the_later() -> None:
    made = lay_out()
    stream = client_data_streams(made, drift("transition"), 1)[1]
    train = sorted(values(made.clients[1].train))
    early, late = train[:16], train[16:]
    assert sorted(values(stream.train(0))) == early
    assert sorted(values(stream.train(110))) == late
    middle = values(stream.train(60))
    assert len(middle) == 16
    assert sum(value in early for value in middle) == 8
    assert max(values(stream.test(0))) < min(values(stream.test(200)))


def test_a_shift_relabels_some_devices() -> None:
    made = lay_out()
    found = client_data_streams(made, drift("shift", share=0.5), 1)
    changed = [
        device
        for device, each in enumerate(found)
        if each.test(10).y.tolist() != made.clients[device].test.y.tolist()
    ]
    assert len(changed) == 2
    for device, each in enumerate(found):
        assert each.train(9.99).y.tolist() == made.clients[device].train.y.tolist()
    train = made.clients[changed[0]].train
    assert found[changed[0]].train(10).y.tolist() == ((train.y + 1) % 5).tolist()
    assert torch.equal(found[changed[0]].train(10).x, train.x)


@given(
    kind=st.sampled_from(["grow", "replace", "transition", "shift"]),
    times=st.lists(st.floats(0, 300), min_size=1, max_size=6),
)
def test_data_are_a_pure_function_of_time(kind: str, times: list[float]) -> None:
    """The data at a time do not depend on earlier queries, their order, or the stream object."""
    made = lay_out(devices=2)
    one, other = (client_data_streams(made, drift(kind, per_second=0.3), 1)[0] for _ in range(2))
    seen = {time: values(one.train(time)) for time in times}
    for time in reversed(times):
        assert values(other.train(time)) == seen[time]


def test_concatenated_streams_change_with_every_part() -> None:
    made = lay_out()
    parts = [each.train for each in client_data_streams(made, drift("grow"), 1)]
    together = concatenate_streams(parts)
    assert len(together(0).y) == 4 * 3
    assert len(together(1000).y) == len(made.pooled().y)


def test_rotations() -> None:
    image = torch.arange(4.0).view(1, 1, 2, 2)
    assert rotated(image).flatten().tolist() == [1, 3, 0, 2]
    assert rotated(torch.tensor([[[1.0, 2.0, 3.0]]])).tolist() == [[[3.0, 1.0, 2.0]]]
    assert rotated(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[3.0, 4.0, 1.0, 2.0]]

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latecomer.data.partition import (
    KINDS,
    by_subject,
    dirichlet,
    iid,
    one_class,
    split_rows,
    time_window,
)
from latecomer.errors import BadInput


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@given(
    name=st.sampled_from(sorted(set(KINDS) - {"time-window"})),
    y=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    devices=st.integers(1, 80),
    alpha=st.sampled_from([5e-324, 1e-300, 1e-3, 0.1, 1.0, 100.0, 1e308]),
    seed=st.integers(0, 2**32),
)
def test_every_example_lies_on_exactly_one_device(
    name: str, y: list[int], devices: int, alpha: float, seed: int
) -> None:
    labels = np.array(y)
    if name == "one-class" and devices < len(set(y)):
        devices = len(set(y))
    shares, again = (
        split_rows(
            name, labels, devices, np.random.default_rng(seed), alpha=alpha, subject=labels[::-1]
        )
        for _ in range(2)
    )
    assert len(shares) == (len(set(y)) if name == "by-subject" else devices)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(len(y)))
    for share, same in zip(shares, again, strict=True):
        assert share.dtype == np.int64
        np.testing.assert_array_equal(share, same)
        np.testing.assert_array_equal(share, np.sort(share))


@pytest.mark.parametrize("name", ["iid", "dirichlet"])
def test_shares_are_of_equal_size(name: str) -> None:
    shares = split_rows(name, np.arange(11) % 2, 4, rng(), alpha=0.1, subject=None)
    assert [len(share) for share in shares] == [3, 3, 3, 2]


def test_more_devices_than_examples() -> None:
    assert [len(share) for share in iid(np.array([0, 1]), 4, rng())] == [1, 1, 0, 0]


def test_alpha_moves_dirichlet_from_one_class_to_the_prior() -> None:
    y = np.repeat(np.arange(5), 200)

    def largest_share(alpha: float) -> float:
        mixes = [np.bincount(y[s], minlength=5) / len(s) for s in dirichlet(y, 10, rng(), alpha)]
        return float(np.mean(np.max(mixes, axis=1)))

    assert largest_share(1e-6) > 0.95
    assert largest_share(1e6) < 0.35


def test_dirichlet_follows_the_prior() -> None:
    y = np.repeat([0, 1], [900, 100])
    first = [dirichlet(y, 10, np.random.default_rng(seed), 1.0)[0] for seed in range(300)]
    assert np.mean([np.mean(y[share] == 1) for share in first]) == pytest.approx(0.1, abs=0.03)


def test_one_class_shares_devices_in_proportion() -> None:
    y = np.repeat([3, 5, 9], [60, 30, 1])
    shares = one_class(y, 7, rng())
    # 60 and 30 examples on 4 and 2 devices, and 1 on one device; ids cycle through the classes.
    assert [sorted(set(y[share].tolist())) for share in shares] == [
        [3],
        [5],
        [9],
        [3],
        [5],
        [3],
        [3],
    ]
    assert [len(share) for share in shares] == [15, 15, 1, 15, 15, 15, 15]


def test_by_subject_is_in_sorted_order() -> None:
    shares = by_subject(np.array(["eve", "bob", "eve", "ann"]))
    assert [share.tolist() for share in shares] == [[3], [1], [0, 2]]


Y = np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("name", "devices", "alpha", "message"),
    [
        ("pie", 2, 1.0, "partition 'pie' is unknown"),
        ("one-class", 2, 1.0, "2 devices for 3 classes; expected at least 3"),
        ("by-subject", 2, 1.0, "needs data with a subject"),
    ],
)
def test_bad_requests(name: str, devices: int, alpha: float, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        split_rows(name, Y, devices, rng(), alpha=alpha, subject=None)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    devices=st.integers(1, 12),
    data=st.data(),
)
def test_a_time_window_is_a_stretch_of_one_recording(
    sizes: list[int], devices: int, data: st.DataObject
) -> None:
    subject = np.repeat(np.arange(len(sizes)), sizes)
    whole = time_window(devices, len(subject), subject, 0)
    assert len(whole) == devices
    window = data.draw(st.integers(0, min(len(share) for share in whole)))
    shares = time_window(devices, len(subject), subject, window)
    for share in shares:
        assert (np.diff(share) == 1).all()
        assert len(set(subject[share])) <= 1
        assert not window or len(share) == window
    rows = np.concatenate(shares)
    assert len(set(rows)) == len(rows)


def test_a_short_window_holds_one_class_and_a_long_one_many() -> None:
    y = np.repeat(np.arange(6), 10)  # one recording: ten examples of each class in turn
    short, long = (time_window(3, 60, None, window) for window in (5, 20))
    assert [len(set(y[share])) for share in short] == [1, 1, 1]
    assert [len(set(y[share])) for share in long] == [2, 2, 2]


def test_a_window_too_long_for_the_devices() -> None:
    with pytest.raises(BadInput, match=r"data\.window = 21: 3 devices have stretches of 20"):
        time_window(3, 60, None, 21)

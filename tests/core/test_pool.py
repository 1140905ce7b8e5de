import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from latecomer.core.pool import Pool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8))))
def test_behaves_like_a_set(steps):
    pool, truth = Pool(), set()
    for add, device in steps:
        (pool.add if add else pool.discard)(device)
        (truth.add if add else truth.discard)(device)
    assert set(pool) == truth
    assert len(pool) == len(truth)
    assert all(device in pool for device in truth)


def test_the_last_device_takes_the_place_of_one_that_left():
    pool = Pool([4, 7, 9, 7])
    assert list(pool) == [4, 7, 9]
    pool.discard(4)
    assert list(pool) == [9, 7]
    pool.discard(7)
    pool.discard(7)
    pool.add(4)
    assert list(pool) == [9, 4]
    assert 7 not in pool


def test_all_waiting_devices_are_drawn_without_using_the_random_stream():
    pool, rng = Pool([2, 0, 1]), np.random.default_rng(0)
    before = rng.bit_generator.state
    assert pool.sample(3, rng) == pool.sample(4, rng) == [2, 0, 1]
    assert rng.bit_generator.state == before


def test_sample_draws_different_devices_and_all_if_too_few():
    pool, rng = Pool(range(10)), np.random.default_rng(0)
    assert all(len(set(pool.sample(9, rng))) == 9 for _ in range(9))
    assert sorted(pool.sample(99, rng)) == list(range(10))
    counts = np.zeros(10)
    for _ in range(2000):
        counts[pool.sample(1, rng)] += 1
    assert counts.min() > 140

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from latecomer.data.scaling import impute, moments, pool, standardise

NAN = float("nan")


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).reshape(-1, 1)


def test_pooled_moments_by_hand() -> None:
    one, two = moments(column(1, 2)), moments(column(3, NAN, 5))
    assert (one.count.item(), one.mean.item(), one.m2.item()) == (2, 1.5, 0.5)
    assert (two.count.item(), two.mean.item(), two.m2.item()) == (2, 4, 2)
    both = pool([one, two])
    # 1, 2, 3, 5: mean 11/4, squares 39 - 4 * (11/4)^2
    assert both.count.item() == 4
    assert both.mean.item() == pytest.approx(2.75)
    assert both.m2.item() == pytest.approx(8.75)
    assert both.std.item() == pytest.approx((8.75 / 4) ** 0.5)


@pytest.mark.parametrize(
    ("shape", "features"), [((4, 3), 3), ((4, 5, 2), 2), ((4, 3, 5, 6), 3), ((0, 5, 2), 2)]
)
def test_one_set_of_moments_per_column_or_channel(shape: tuple[int, ...], features: int) -> None:
    x = np.ones(shape, dtype=np.float32)
    found = moments(x)
    assert found.count.shape == found.mean.shape == found.m2.shape == (features,)
    assert (found.count == x.size / features).all()
    assert standardise(x, found).shape == shape


@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 30), st.integers(1, 3)),
        elements=st.floats(-1000, 1000, width=32) | st.just(NAN),
    ),
    cuts=st.lists(st.integers(0, 30), max_size=5),
)
def test_pooled_equals_direct(x: np.ndarray, cuts: list[int]) -> None:
    pooled = pool([moments(part) for part in np.split(x, sorted(cuts))])
    direct = moments(x)
    np.testing.assert_array_equal(pooled.count, direct.count)
    np.testing.assert_allclose(pooled.mean, direct.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pooled.m2, direct.m2, rtol=1e-6, atol=1e-6)


def test_a_large_offset_loses_no_precision() -> None:
    x = column(*(1e6 + np.arange(64)))
    pooled = pool([moments(part) for part in np.split(x, 8)])
    assert pooled.std.item() == pytest.approx(np.arange(64).std(), rel=1e-9)


def test_standardise_by_hand() -> None:
    x = np.array([[1, 7, NAN], [3, 7, NAN], [NAN, NAN, NAN]], dtype=np.float32)
    by = moments(x)
    np.testing.assert_allclose(standardise(x, by), [[-1, 0, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(impute(x, by), [[1, 7, 0], [3, 7, 0], [2, 7, 0]])
    assert standardise(x, by).dtype == impute(x, by).dtype == np.float32
    assert np.isnan(x[2]).all()


def test_a_constant_feature_is_divided_by_one() -> None:
    x = column(*[0.1] * 7)
    pooled = pool([moments(x[:3]), moments(x[3:])])
    assert pooled.std.item() == 1
    np.testing.assert_allclose(standardise(column(0.1, 2.1), pooled), column(0, 2), atol=1e-6)


def test_unobserved_features_take_the_other_moments() -> None:
    mine = moments(np.array([[1, NAN], [3, NAN]], dtype=np.float32))
    other = moments(np.array([[9, 4], [9, 8]], dtype=np.float32))
    filled = mine.filled_from(other)
    assert filled.mean.tolist() == [2, 6]
    assert filled.std.tolist() == [1, 2]

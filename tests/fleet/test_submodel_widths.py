import pytest

from latecomer.errors import BadInput
from latecomer.fleet.presets import TIERS, tiers
from latecomer.fleet.submodel_widths import widths_by_speed

TABLE = (1.0, 0.75, 0.5, 0.25)


def test_the_fastest_get_the_widest():
    costs = [8.0, 1.0, 4.0, 2.0]
    assert widths_by_speed(costs, TABLE, (1, 1, 1, 1)) == [0.25, 1.0, 0.5, 0.75]


def test_ten_devices_three_three_two_two():
    found = widths_by_speed([1.0] * 10, TABLE, (3, 3, 2, 2))
    assert found == [1.0] * 3 + [0.75] * 3 + [0.5] * 2 + [0.25] * 2


def test_the_order_of_the_table_does_not_matter():
    costs = [3.0, 1.0, 2.0, 4.0, 5.0]
    assert widths_by_speed(costs, (0.25, 1.0), (3, 2)) == widths_by_speed(
        costs, (1.0, 0.25), (2, 3)
    )


@pytest.mark.parametrize("shares", [(0.3, 0.3, 0.2, 0.2), (30, 30, 20, 20), (1.5, 1.5, 1, 1)])
def test_only_the_proportions_of_the_shares_count(shares):
    costs = [float(device) for device in range(10)]
    assert widths_by_speed(costs, TABLE, shares) == widths_by_speed(costs, TABLE, (3, 3, 2, 2))


def test_decimal_shares_are_exact():
    # Of 5 devices 1.5 : 1 : 2.5; the tie goes to the first, though 0.3 is a little less in binary.
    costs = [0.0] * 5
    assert widths_by_speed(costs, (1, 0.5, 0.25), (0.3, 0.2, 0.5)) == [1, 1, 0.5, 0.25, 0.25]


def test_largest_remainder():
    # 7 * (3, 3, 2, 2) / 10 = 2.1, 2.1, 1.4, 1.4: one is left over, for the first 1.4.
    found = widths_by_speed([0.0] * 7, TABLE, (3, 3, 2, 2))
    assert [found.count(width) for width in TABLE] == [2, 2, 2, 1]


def test_a_share_of_nothing():
    assert widths_by_speed([1.0, 2.0], (1.0, 0.5), (0, 1)) == [0.5, 0.5]
    assert widths_by_speed([], (1.0, 0.5), (1, 1)) == []


def test_types_of_devices_get_their_width():
    """PrivaAsyncFed's setup: four types of devices, four widths."""
    fleet = tiers(20, seed=1)
    found = widths_by_speed([p.compute_seconds(100) for p in fleet], TABLE, (3, 3, 2, 2))
    kinds = [name for name, _, _ in TIERS]
    assert all(TABLE[kinds.index(p.group)] == w for p, w in zip(fleet, found, strict=True))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((1, 1, 1), "3 shares for 4 widths"),
        ((1, 1, 1, -1), "shares 1 : 1 : 1 : -1: must be 0 or more"),
        ((0, 0, 0, 0), "one of them above 0"),
    ],
)
def test_bad_shares_are_refused(shares, words):
    with pytest.raises(BadInput, match=words):
        widths_by_speed([1.0, 2.0], TABLE, shares)

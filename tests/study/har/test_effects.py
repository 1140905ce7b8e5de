import math

import pandas as pd
import pytest

from latecomer.study.har.effects import paired


def test_an_interval_by_hand() -> None:
    found = paired(pd.Series([0.02, 0.03, 0.04]))
    assert (found.mean, found.std) == (pytest.approx(0.03), pytest.approx(0.01))
    assert found.half_width == pytest.approx(4.30 * 0.01 / math.sqrt(3))
    assert found.sign == 1
    assert str(found) == "+0.030 ± 0.010"


@pytest.mark.parametrize(
    ("differences", "sign", "negligible"),
    [
        ([-0.02, -0.03, -0.04], -1, False),
        ([0.02, -0.03, 0.04], 0, False),
        ([0.001, 0.0011, 0.0012], 0, True),  # certain, but negligible
        ([0.5], 0, False),  # the interval of a single seed is infinite
        ([], 0, False),
    ],
)
def test_clear_and_negligible_effects(
    differences: list[float], sign: int, negligible: bool
) -> None:
    found = paired(pd.Series(differences, dtype=float))
    assert (found.sign, found.negligible) == (sign, negligible)

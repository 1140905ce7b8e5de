import math

import pandas as pd
import pytest

from latecomer.study.har.effects import effect, paired


def test_an_interval_by_hand() -> None:
    found = paired([0.02, 0.03, 0.04])
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
    found = paired(differences)
    assert (found.sign, found.negligible) == (sign, negligible)


def test_differences_are_paired_by_seed() -> None:
    rows = [("base", "", seed, 0.5 + seed) for seed in (1, 2)]
    rows += [("scale", "local", seed, 0.4 + seed) for seed in (2, 1)]
    table = pd.DataFrame(rows, columns=["factor", "value", "seed", "macro_f1"])
    table["paradigm"] = "asynchronous"
    found = effect(table, "asynchronous", "scale", "local")
    assert found is not None
    assert found.mean == pytest.approx(-0.1)
    assert found.std == pytest.approx(0.0)
    assert effect(table, "synchronous", "scale", "local") is None

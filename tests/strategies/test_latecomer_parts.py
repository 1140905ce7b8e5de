"""The parts that the options of the default strategy switch on."""

import pytest

from latecomer.core.strategy import no_compensation, same_lineage
from latecomer.strategies.latecomer.strategy import Advanced, latecomer

FULL = ["MidTaskPush", "ModelAveraging", "Personalisation", "Calibration"]
SERVING = {"interpolation": 0.0, "prior_correction": 0.0}


@pytest.mark.parametrize(
    ("options", "advanced", "observers", "clustered"),
    [
        ({}, {}, FULL, True),
        ({"push": False}, {}, FULL[1:], True),
        ({}, {"averaging": False}, ["MidTaskPush", "Personalisation", "Calibration"], True),
        ({"clusters": 1}, {}, FULL, True),
        ({"clusters": 1, "calibrate": 0.0}, {"interpolation": 0.0}, FULL, True),
        ({"clusters": 1, "calibrate": 0.0}, {"prior_correction": 0.0}, FULL, True),
        ({"clusters": 1, "personalise": False}, {}, FULL, True),
        ({"clusters": 1, "calibrate": 0.0, "personalise": False}, {}, FULL[:3], False),
        ({"clusters": 1, "calibrate": 0.0}, SERVING, FULL[:3], False),
        ({"clusters": 2, "calibrate": 0.0}, SERVING | {"averaging": False}, FULL[:1], True),
    ],
)
def test_observers(options, advanced, observers, clustered):
    strategy = latecomer(**options, advanced=Advanced(**advanced))
    assert [type(part).__name__ for part in strategy.observers] == observers
    assert (strategy.route is not same_lineage) is clustered
    assert strategy.personal is (options.get("clusters", 4) > 1)


@pytest.mark.parametrize(
    ("options", "compensates", "renews"),
    [
        ({}, True, True),
        ({"surrogates": False}, True, False),
        ({"compensate": False}, False, False),
    ],
)
def test_compensation_and_surrogates(options, compensates, renews):
    strategy = latecomer(**options)
    assert (strategy.compensate is not no_compensation) is compensates
    assert strategy.inverts is compensates
    assert (strategy.merge.surrogates is not None) is renews


@pytest.mark.parametrize("wait", [False, True])
def test_where_devices_wait_an_update_is_late_without_a_ratio(wait):
    strategy = latecomer(advanced=Advanced(wait=wait))
    assert strategy.dispatch.wait is wait
    assert (strategy.compensate.min_ratio == 0.0) is wait

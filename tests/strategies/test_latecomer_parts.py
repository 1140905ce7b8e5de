"""The parts that the options of the default strategy switch on."""

import pytest

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import no_compensation, same_lineage
from latecomer.strategies.latecomer.strategy import latecomer


@pytest.mark.parametrize(
    ("options", "observers", "clustered"),
    [
        ({}, ["Calibration"], True),
        ({"calibrate": 0.0}, [], True),
        ({"clusters": 1}, ["Calibration"], True),  # its reports are those of the clustering
        ({"clusters": 1, "calibrate": 0.0}, [], False),
    ],
)
def test_observers(options, observers, clustered):
    strategy = latecomer(**options)
    assert [type(part).__name__ for part in strategy.observers] == observers
    assert (strategy.route is not same_lineage) is clustered
    assert (strategy.dispatch.clustering is not None) is clustered
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


def test_devices_report_on_the_examples_they_train_on():
    spec = latecomer().prepare(TrainSpec(hold_back=True))
    assert not spec.hold_back
    assert spec.prior_correction

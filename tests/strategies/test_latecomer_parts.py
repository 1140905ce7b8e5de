"""The parts that the options of the default strategy switch on."""

import pytest

from latecomer.core.messages import TrainSpec
from latecomer.core.strategy import ImmediateDispatch, no_compensation, same_lineage
from latecomer.strategies.latecomer.strategy import latecomer


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


def test_all_devices_share_one_model_and_report_nothing_beside_their_update():
    strategy = latecomer()
    assert strategy.route is same_lineage
    assert isinstance(strategy.dispatch, ImmediateDispatch)
    assert not strategy.personal
    assert not strategy.observers
    assert strategy.prepare(TrainSpec()) == TrainSpec()


def test_options_reach_their_parts():
    strategy = latecomer(share=0.7, server_gflops=3.0, samples=5, iterations=6)
    compensator = strategy.compensate
    assert strategy.merge.share == 0.7
    assert compensator.gflops == 3.0
    assert (compensator.effort.samples, compensator.effort.iterations) == (5, 6)
    assert strategy.merge.surrogates.compensator is compensator

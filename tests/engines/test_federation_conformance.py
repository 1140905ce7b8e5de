"""What is simulated is what is deployed: the loop gives the models of the virtual engine."""

import pytest

from fake_grid import ToyFederation
from latecomer.strategies.recipe import recipes
from toy import ToyRun, toy_fleet, toy_server

pytestmark = pytest.mark.parametrize("name", sorted(recipes()))
KINDS = ("dispatch", "arrival", "commit", "split", "merge", "compensation", "drop", "retire")


def lines(log):
    """The log without spans, which only the virtual engine writes."""
    return [
        (time, kind, {name: value for name, value in fields.items() if name != "spans"})
        for time, kind, fields in log
        if kind in KINDS
    ]


def test_the_loop_and_the_virtual_engine_agree_to_the_bit(name):
    # The virtual time of inversions passes in simulations only.
    options = {"server_gflops": 0.0} if "server_gflops" in recipes()[name].options else {}
    virtual = ToyRun(toy_server(name, options), toy_fleet())
    virtual.until(60)
    real = ToyFederation(name, options=options)
    assert real.until(60) == "updates"
    assert real.heads() == virtual.heads()
    assert lines(real.log) == lines(virtual.log)
    assert real.server.store.versions == virtual.server.store.versions
    if options:
        slow = ToyFederation(name, options={"server_gflops": 1e-9})
        slow.until(60)
        assert slow.heads() == real.heads()

"""Each recipe at its limit is the plainer one, bit for bit."""

import pytest

from latecomer.core.messages import Joined, Send
from latecomer.strategies.parts import compensation
from latecomer.strategies.parts.switch_off import SwitchOff
from toy import ToyRun, toy_fleet, toy_server


def heads(name, updates=60, **options):
    run = ToyRun(toy_server(name, options), toy_fleet())
    run.until(updates)
    return run.heads(), run.server.spec


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("fedprox", {"mu": 0.0}), ("fedavg", {})),
        (("semi-async", {"quorum": 1.0}), ("fedavg", {})),
        (("weighted", {"quorum": 1.0, "a": 50.0, "b": 1000.0}), ("fedavg", {})),
        (("fedasync", {"decay": "polynomial", "p": 0.0}), ("fedasync", {"decay": "constant"})),
        (("fedasync", {"decay": "hinge", "b": 1e9}), ("fedasync", {"decay": "constant"})),
        (("fedbuff", {"p": 0.0}), ("fedbuff", {"decay": "constant"})),
        (("feddc", {"min_staleness": 10**9}), ("semi-async", {})),
        (("feddc", {"min_staleness": 10**9, "surrogates": True}), ("semi-async", {})),
        (("feddc-fedasync", {"min_staleness": 10**9}), ("fedasync", {})),
        (("feddc-fedasync", {"min_ratio": 1e9}), ("fedasync", {})),
        (("feddc-fedbuff", {"min_staleness": 10**9}), ("fedbuff", {})),
    ],
)
def test_limits(one, other):
    assert heads(one[0], **one[1]) == heads(other[0], **other[1])


def test_feddc_with_a_closed_gate_is_semi_async(monkeypatch):
    monkeypatch.setattr(compensation, "is_unique", lambda *_: False)
    assert heads("feddc") == heads("semi-async")
    assert heads("feddc-fedbuff", min_ratio=0.0) == heads("fedbuff")


def test_feddc_switched_off_is_semi_async(monkeypatch):
    monkeypatch.setattr(SwitchOff, "gamma", lambda *_: 0.0)
    assert heads("feddc") == heads("semi-async")
    assert heads("feddc-fedasync", min_ratio=0.0) == heads("fedasync")


def test_feddc_does_repair_in_these_runs():
    assert heads("feddc") != heads("semi-async")


def test_fedprox_tells_its_devices_to_stay_near():
    assert heads("fedprox", mu=0.3)[1].prox == 0.3


def test_standalone_shares_nothing():
    """Device 4 alone, and among others, ends at the same model."""
    run = ToyRun(toy_server("standalone"), toy_fleet())
    run.until(100)
    own = [f for _, f in run.lines("arrival") if f["device"] == 4]
    assert {f["lineage"] for f in own} == {"device-4"}
    assert {f["staleness"] for f in own} == {0}
    # Half-way to a point near 4 with every update: 4 (1 - 2^-n), but for the noise.
    n = len(own)
    assert run.heads()["device-4"] == pytest.approx([4 * (1 - 0.5**n)] * 6, abs=0.4)


def test_centralised_replaces_the_model_with_each_update():
    run = ToyRun(toy_server("centralised"), toy_fleet(1))
    run.until(1)
    first = run.trainer.update(next(iter(toy_tasks())))
    assert run.heads()["main"] == pytest.approx(first.delta.tolist())


def toy_tasks():
    server = toy_server("centralised")
    return [c.task for c in server.handle(Joined(0)) if isinstance(c, Send)]

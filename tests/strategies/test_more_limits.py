"""Robust rules and server optimisers at their limits: the plainer strategy, but for rounding."""

import pytest
import torch

from latecomer.core.messages import TrainSpec
from latecomer.core.server import Server
from latecomer.core.strategy import Commit, Strategy
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.parts.weighting import by_staleness, constant
from toy import ToyRun, toy_fleet, toy_run


def same(one, other, rel=1e-5):
    assert one.server.store.commits == other.server.store.commits > 5
    assert one.heads()["main"] == pytest.approx(other.heads()["main"], rel=rel, abs=1e-6)


class AddDelta:
    """FedAsync in delta form: w <- w + a delta."""

    def add(self, contribution, view):
        head = view.store.head_params(contribution.lineage)
        params = torch.add(head, contribution.delta, alpha=contribution.weight)
        return Commit(contribution.lineage, params, 1)

    def settle(self, view):
        return ()


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_fedbuff_of_one_with_constant_weight_is_the_delta_form_of_fedasync(alpha):
    weigh = by_staleness(constant(), scale=alpha)
    server = Server(torch.zeros(6), Strategy(weigh=weigh, merge=AddDelta()), TrainSpec(), seed=7)
    delta_form = ToyRun(server, toy_fleet())
    delta_form.until(60)
    ours = toy_run("fedbuff", 60, size=1, decay="constant", server_lr=alpha)
    assert ours.heads() == delta_form.heads()  # bit for bit


def test_fedbuff_of_one_and_fedasync_agree_if_nobody_is_stale():
    alone = toy_fleet(1)
    ours = toy_run("fedbuff", 60, alone, size=1, decay="constant", server_lr=0.3)
    same(ours, toy_run("fedasync", 60, alone, alpha=0.3))


@pytest.mark.parametrize("rule", ["trimmed-mean", "clip"])
def test_a_rule_that_cuts_nothing_off_is_the_mean(rule):
    nothing = {"rule": rule, "trim": 0.0, "bound": 1e9}
    same(toy_run("robust-quorum", 80, **nothing), toy_run("semi-async", 80))
    ours = toy_run("robust-fedbuff", 80, votes_per="update", **nothing)
    same(ours, toy_run("fedbuff", 80))


def test_the_median_of_one_is_fedbuff_of_one():
    same(toy_run("robust-fedbuff", 80, size=1), toy_run("fedbuff", 80, size=1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavgm", {"beta": 0.0, "server_lr": 1.0}),
        # With a huge tau the root of v is tau, or nothing beside it: m / 2 tau, or m / tau.
        ("fedadagrad", {"beta1": 0.0, "tau": 1e6, "server_lr": 2e6}),
        ("fedyogi", {"beta1": 0.0, "tau": 1e6, "server_lr": 2e6}),
        ("fedadam", {"beta1": 0.0, "beta2": 0.0, "tau": 1e6, "server_lr": 1e6}),
    ],
)
def test_server_optimisers_without_memory_are_fedavg(name, options):
    same(toy_run(name, 80, **options), toy_run("fedavg", 80))


def test_fadas_with_a_huge_eps_is_fedbuff():
    options = {"beta1": 0.0, "eps": 1e6, "server_lr": 1e6, "tau_c": 10**9}
    plain = toy_run("fedbuff", 80, size=5, decay="constant")
    same(toy_run("fadas", 80, size=5, **options), plain)


def test_ca2fl_with_one_device_is_fedbuff():
    plain = toy_run("fedbuff", 80, toy_fleet(1), size=3, decay="constant")
    same(toy_run("ca2fl", 80, toy_fleet(1), size=3), plain)


def test_ca2fl_is_the_mean_if_all_are_in_every_buffer():
    """Equally fast devices, and a buffer for all of them: rounds of FedAvg."""
    even = Fleet(tuple(DeviceProfile(seconds_per_task=1.0) for _ in range(5)), seed=3)
    same(toy_run("ca2fl", 80, even, size=5), toy_run("fedavg", 80, even))


def test_asyncfeded_at_distance_0_adds_the_delta():
    alone = toy_fleet(1)
    ours = toy_run("asyncfeded", 80, alone, lam=1.0, eps=1.0)
    plain = toy_run("fedbuff", 80, alone, size=1, decay="constant")
    assert ours.heads() == plain.heads()  # bit for bit

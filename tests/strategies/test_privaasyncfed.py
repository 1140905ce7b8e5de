"""PrivaAsyncFed, DP-FedAsync and HeteroFL: weights by hand, limits, and the narrow in the wide."""

import pytest
import torch

import toy
from latecomer.core.messages import MAIN, Contribution, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import take
from latecomer.device.client import Client
from latecomer.device.networks import Networks, build_networks
from latecomer.device.privacy import Privacy
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, VirtualEngine
from latecomer.strategies.parts.submodel_levels import declared_levels
from latecomer.strategies.recipe import build_strategy, recipes
from toy import toy_fleet, toy_run

# Eqs. 15 and 16


def weight(staleness, **options):
    task = Task(0, 0, 0, MAIN, 0, TrainSpec(), torch.zeros(1))
    update = Update(0, torch.zeros(1), 1)
    contribution = Contribution(task, update, task.params, update.delta, MAIN, staleness)
    return build_strategy("privaasyncfed", options).weigh(contribution, None)


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        (0, 0.6),
        (1, 0.6),
        (4, 0.6),
        (5, 0.6),  # as printed 1 / (0.5 * 1) = 2, and alpha would be 1.2
        (6, 0.6),  # 1 / (0.5 * 2) = 1
        (7, 0.4),  # 1 / (0.5 * 3) = 2/3
        (10, 0.2),  # 1 / (0.5 * 6) = 1/3
        (104, 0.012),  # 1 / (0.5 * 100) = 0.02
    ],
)
def test_weights_by_hand(staleness, expected):
    assert weight(staleness, beta=0.6, a=0.5, b=4.0) == pytest.approx(expected, rel=1e-12)


def test_the_defaults_are_these():
    assert [weight(tau) for tau in (0, 5, 7)] == pytest.approx([0.6, 0.6, 0.4])


def test_no_weight_exceeds_beta_and_none_grows_with_staleness():
    for a in (0.0, 0.01, 0.5, 3.0):
        weights = [weight(tau, beta=0.8, a=a, b=2.5) for tau in range(60)]
        assert max(weights) == 0.8
        assert weights == sorted(weights, reverse=True)
    assert {weight(tau, a=0.0) for tau in range(60)} == {0.6}


def test_what_each_recipe_is_meant_for():
    meant = {n: (r.widths, r.private) for n, r in recipes().items() if r.widths or r.private}
    assert meant == {
        "privaasyncfed": (True, True),
        "dp-fedasync": (False, True),
        "heterofl": (True, False),
    }


# Limits


def test_on_whole_models_it_is_fedasync_with_the_same_weights():
    """19 devices, so that some updates are staler than b."""
    fleet = toy_fleet(19)
    ours = toy_run("privaasyncfed", 150, fleet, beta=0.5, a=0.3, b=2.0)
    plain = toy_run("fedasync", 150, fleet, alpha=0.5, decay="reciprocal", p=0.3, b=2.0)
    assert ours.heads() == plain.heads()
    assert ours.log == plain.log
    assert len({fields["weight"] for _, fields in ours.lines("arrival")}) > 5


def test_dp_fedasync_is_fedasync():
    ours, plain = (
        toy_run("dp-fedasync", alpha=0.5, decay="hinge"),
        toy_run("fedasync", alpha=0.5, decay="hinge"),
    )
    assert ours.heads() == plain.heads()
    assert toy_run("dp-fedasync").heads() == toy_run("fedasync").heads()


def test_heterofl_on_whole_models_is_fedavg_of_equal_devices(monkeypatch):
    monkeypatch.setattr(toy, "EXAMPLES", 8)  # a power of two is divided out without rounding
    assert toy_run("heterofl", 60).heads() == toy_run("fedavg", 60).heads()
    some = toy_run("heterofl", 60, fraction=0.4).heads()
    assert some == toy_run("fedavg", 60, fraction=0.4).heads()
    assert some != toy_run("fedavg", 60).heads()


def test_heterofl_counts_devices_and_not_examples():
    task = Task(0, 0, 0, MAIN, 0, TrainSpec(), torch.zeros(1))
    weigh = build_strategy("heterofl").weigh
    for examples in (1, 1000):
        update = Update(0, torch.ones(1), examples)
        assert weigh(Contribution(task, update, task.params, update.delta, MAIN, 0), None) == 1.0


# A fleet of one level is plain training of the narrow network inside the wide one.

NETWORKS = build_networks("mlp", (6,), 3, (8, 4), (1.0, 0.5))
HALF = NETWORKS.submodels[0.5]
ALONE = Networks(NETWORKS(HALF))
SPEC = TrainSpec(local_epochs=1, batch_size=4, lr=0.1)
NOISY = Privacy("gaussian", multiplier=0.5, clip=1.0, delta=1e-5)
MIXED = ("privaasyncfed", "dp-fedasync", "fedasync", "asyncfeded", "standalone")
GATHERED = ("heterofl", "fedavg", "fedbuff", "semi-async", "fadas", "ca2fl", "aso-fed", "fedadam")


def examples_of(device):
    rng = torch.Generator().manual_seed(device)
    n = 8 + device
    return torch.randn(n, 6, generator=rng), torch.randint(0, 3, (n,), generator=rng)


def trained(networks, initial, strategy, privacy=None):
    """The heads after 60 updates of 5 devices."""
    server = Server(initial, strategy, SPEC, seed=7, networks=networks)
    clients = {d: Client(d, networks, *examples_of(d), seed=5, privacy=privacy) for d in range(5)}
    engine = VirtualEngine(server, toy_fleet(), OneByOne(clients), range(5))
    assert engine.run(Bounds(60), lambda: True) == "updates"
    return {name: server.store.head_params(name) for name in server.store.lineages}


def in_the_wide_and_alone(name, privacy=None):
    """What a fleet makes of the narrow network as a part, and as a model of its own."""
    whole = NETWORKS.whole.init(3)
    inside = declared_levels(build_strategy(name), [HALF] * 5)
    wide = trained(NETWORKS, whole, inside, privacy)
    alone = trained(ALONE, take(whole, HALF), build_strategy(name), privacy)
    assert wide.keys() == alone.keys()
    outside = torch.ones(whole.numel(), dtype=torch.bool)
    outside[HALF.index] = False
    assert 0 < outside.sum() < whole.numel()
    for head in wide.values():
        assert torch.equal(head[outside], whole[outside])
    assert any(not torch.equal(head, whole) for head in wide.values())
    return {n: take(head, HALF) for n, head in wide.items()}, alone


@pytest.mark.parametrize("privacy", [None, NOISY], ids=["plain", "private"])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_at_once_it_is_the_same_bit_for_bit(name, privacy):
    inside, alone = in_the_wide_and_alone(name, privacy)
    for lineage, head in alone.items():
        assert torch.equal(inside[lineage], head)


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_it_is_the_same_but_for_rounding(name):
    """Sums over coordinates that not all have trained are divided in another order."""
    inside, alone = in_the_wide_and_alone(name)
    for lineage, head in alone.items():
        assert torch.allclose(inside[lineage], head, rtol=1e-4, atol=1e-6)

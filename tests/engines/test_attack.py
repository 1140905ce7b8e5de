"""Each kind of hostile update, worked out by hand; and when it begins."""

from itertools import pairwise

import pytest
import torch

from latecomer.core.messages import MAIN, Task, TrainSpec, Update
from latecomer.device.client import Client
from latecomer.device.flat import flat_model
from latecomer.engines.attack import Attack, FlippedLabels, hostile_devices
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.engines.virtual import Bounds
from toy import ToyRun, toy_fleet, toy_server

DELTA = [3.0, -4.0, 0.0]
SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.1)


def task(device=2, number=0, identity=0, params=None):
    params = torch.zeros(3) if params is None else params
    return Task(identity, device, number, MAIN, 0, SPEC, params)


def attacking(kind, strength=10.0, devices=(2,), begin=0, seed=1):
    attack = Attack(kind, devices, strength, begin, seed)
    attack.sent(task(), begin)
    return attack


def honest(delta=DELTA):
    return Update(0, None if delta is None else torch.tensor(delta), 7, {"loss_rms": 0.5})


@pytest.mark.parametrize(
    ("kind", "strength", "delta", "examples"),
    [
        ("none", 10.0, DELTA, 7),
        ("sign-flip", 10.0, [-30.0, 40.0, 0.0], 7),
        ("sign-flip", 0.5, [-1.5, 2.0, 0.0], 7),
        ("scale", 10.0, [30.0, -40.0, 0.0], 7),
        ("free-rider", 10.0, [0.0, 0.0, 0.0], 7),
        ("label-flip", 10.0, DELTA, 7),  # it is in the training
        ("claim-examples", 10.0, DELTA, 70),
        ("claim-examples", 1e9, DELTA, 7 * 10**9),
        ("claim-examples", 1e9 / 7, DELTA, 10**9),
        ("claim-examples", 0.01, DELTA, 1),
    ],
)
def test_the_delta_and_the_examples_of_each_kind(kind, strength, delta, examples):
    found = attacking(kind, strength).changed(honest(), task())
    assert found.delta.tolist() == delta
    assert (found.num_examples, type(found.num_examples)) == (examples, int)
    assert found.metrics == {"loss_rms": 0.5}


def test_noise_has_strength_times_the_norm_of_the_delta_and_is_new_in_every_task():
    def noise(number=0, device=2, seed=1):
        attack = attacking("noise", strength=3.0, devices=(2, 3), seed=seed)
        return attack.changed(honest(), task(device, number)).delta - torch.tensor(DELTA)

    drawn = [noise(), noise(number=1), noise(device=3), noise(seed=2)]
    assert [each.norm().item() for each in drawn] == pytest.approx([15.0] * 4, rel=1e-5)
    directions = torch.stack(drawn) / 15
    assert (directions @ directions.T).fill_diagonal_(0).max() < 0.999
    assert torch.equal(noise(), drawn[0])
    zero = attacking("noise").changed(honest([0.0, 0.0, 0.0]), task()).delta
    assert zero.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "noise", "free-rider"])
def test_other_devices_and_updates_without_a_delta_are_left_alone(kind):
    attack, update, empty = attacking(kind), honest(), honest(None)
    assert attack.changed(update, task(device=1)) is update
    assert attack.changed(empty, task()) is empty


def two_clients():
    model = flat_model("mlp", (4,), 3, (5,))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 0, 1])
    return model, {
        label: Client(2, model, x, each, 5) for label, each in (("y", y), ("2-y", 2 - y))
    }


@pytest.mark.parametrize("size", [0, 4])
def test_flipped_labels_are_those_from_the_other_end(size):
    model, clients = two_clients()
    attack = attacking("label-flip")
    given = task(params=model.init(0))
    assert attack.clients({2: clients["y"]})[2].data(given)[1].tolist() == [2, 1, 0, 2, 2, 1]

    def trained(client):
        trainer = Batched({2: client}, size) if size else OneByOne({2: client})
        trainer.expect(given, 1.0)
        return trainer.update(given).delta

    flipped = trained(attack.clients({2: clients["y"]})[2])
    assert torch.equal(flipped, trained(clients["2-y"]))
    assert not torch.equal(flipped, trained(clients["y"]))


def test_only_hostile_devices_get_another_client_and_only_to_flip_labels():
    _, clients = two_clients()
    fleet = {2: clients["y"], 3: clients["2-y"]}
    changed = attacking("label-flip").clients(fleet)
    assert isinstance(changed[2], FlippedLabels)
    assert changed[3] is fleet[3]
    assert attacking("scale").clients(fleet) is fleet


def test_the_share_of_the_fleet_is_hostile_and_a_larger_share_adds_to_it():
    fleet = [device for device in range(60) if device % 3]
    shares = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
    found = [hostile_devices(fleet, share, seed=1) for share in shares]
    assert [len(each) for each in found] == [0, 1, 4, 10, 20, 40]
    assert all(small < large for small, large in pairwise(found))
    assert found[-1] == set(fleet)
    assert found == [hostile_devices(reversed(fleet), share, seed=1) for share in shares]
    assert found[2] != hostile_devices(fleet, 0.1, seed=2)


class Recorded(Attack):
    """Keeps, of every task whose update was made, its number and whether it was hostile."""

    def changed(self, update, given):
        vars(self).setdefault("seen", {})[given.id] = self.concerns(given)
        return super().changed(update, given)


def toy_run(begin):
    run = ToyRun(toy_server("fedasync"), toy_fleet())
    run.engine.attack = Recorded("free-rider", range(5), begin=begin)
    return run


def test_the_first_hostile_task_is_the_first_sent_after_begin_updates():
    run = toy_run(begin=12)
    run.until(40)
    sent = [fields["task"] for _, fields in run.lines("dispatch")]
    updates = [kind for _, kind, _ in run.log if kind in ("arrival", "dispatch")]
    before = [i for i, kind in enumerate(updates) if kind == "arrival"][11]
    first = sent[updates[:before].count("dispatch")]
    assert run.engine.attack.seen == {each: each >= first for each in run.engine.attack.seen}
    assert set(run.engine.attack.seen.values()) == {False, True}


@pytest.mark.parametrize("cut", [5, 12, 20])
def test_a_resumed_run_has_the_same_hostile_tasks(cut):
    whole, begun = toy_run(begin=12), toy_run(begin=12)
    whole.until(40)
    begun.engine.run(Bounds(40), lambda: begun.server.accepted < cut)
    resumed = begun.carried_over(toy_run(begin=12))
    resumed.until(40)
    assert begun.engine.attack.seen | resumed.engine.attack.seen == whole.engine.attack.seen
    assert resumed.heads() == whole.heads()

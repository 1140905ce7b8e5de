"""A newer model reaches a working device: when it takes effect, and the update it makes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from latecomer.core.messages import MAIN, Offer, Task, TrainSpec
from latecomer.core.server import Server
from latecomer.core.strategy import ImmediateDispatch, Strategy
from latecomer.core.submodel import Submodel, take
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel
from latecomer.device.training import Plan, local_update
from latecomer.engines.trainers import Batched, OneByOne
from latecomer.engines.virtual import ServerCosts
from latecomer.fleet.fleet import Fleet, with_lateness
from latecomer.fleet.late import Lateness
from latecomer.fleet.profile import DeviceProfile
from latecomer.strategies.papers.fedasync import polynomial
from latecomer.strategies.parts.broadcasts import Broadcasting
from latecomer.strategies.parts.weighting import by_staleness
from toy import SIZE, ToyRun, ToyTrainer

MODEL = FlatModel(lambda: nn.Linear(2, 2), (2,), 2)
SPEC = TrainSpec(local_epochs=4, batch_size=6, lr=0.3, momentum=0.5)
BYTES = 4 * SIZE


def clients(count=2, examples=8):
    generator = torch.Generator().manual_seed(1)
    found = {}
    for device in range(count):
        x = torch.randn(examples + device, 2, generator=generator)
        y = torch.randint(0, 2, (examples + device,), generator=generator)
        found[device] = Client(device, MODEL, x, y, seed=5)
    return found


def server(policy="always", dispatch=None, **options):
    strategy = Strategy(
        weigh=by_staleness(polynomial(0.5), scale=0.6),
        dispatch=dispatch or ImmediateDispatch(),
        observers=(Broadcasting(policy, **options),),
    )
    return Server(MODEL.init(3), strategy, SPEC, seed=7)


def slow_and(fast, slow=None, **run):
    """Device 0 trains for 8 s, 2 s for each of its 4 passes; device 1 needs `fast` s for all."""
    slow = slow or DeviceProfile(seconds_per_example=0.25)
    fleet = Fleet((slow, DeviceProfile(seconds_per_task=fast)), seed=0)
    trainer = run.pop("trainer", None) or OneByOne(clients())
    return ToyRun(server(run.pop("policy", "always")), fleet, trainer=trainer, **run)


def arrival(run, device):
    return next((time, f) for time, f in run.lines("arrival") if f["device"] == device)


def rebases(run):
    """Task -> (local epochs done, number of the model it continues from), for open tasks."""
    return run.engine.state()["rebases"]


def pinned(run):
    """Every version is pinned as often as open tasks were sent it."""
    store, tasks = run.server.store, run.server.open_tasks.values()
    sent = [version for task in tasks for version in task.versions]
    return all(store.pins(version) == sent.count(version) for version in store.versions) and set(
        sent
    ) <= set(store.versions)


# When


def test_it_takes_effect_after_the_local_epoch_of_its_arrival():
    """At 3 s device 0 is in its second pass, at 6 s its third has just ended."""
    run = slow_and(3.0)
    run.until(1)
    assert rebases(run) == {0: ((2, 1),)}
    run.until(2)
    assert rebases(run) == {0: ((2, 1), (3, 2))}
    run.until(3)
    time, line = arrival(run, 0)
    assert time == 8.0
    assert (line["sent"], line["staleness"]) == (2, 0)
    # Its commit is broadcast too: device 1 has trained for two of its three seconds.
    assert rebases(run) == {3: ((3, 1),)}


def test_of_two_in_one_pass_the_later_counts():
    run = slow_and(0.75)
    run.until(1)
    assert rebases(run) == {0: ((1, 1),)}
    run.until(2)
    assert rebases(run) == {0: ((1, 2),)}


def test_in_the_last_pass_it_is_too_late():
    run = slow_and(7.0)
    run.until(1)
    assert rebases(run) == {}
    assert len(run.lines("broadcast")) == 1
    assert len(run.server.open_tasks[0].broadcasts) == 1
    run.until(2)
    _, line = arrival(run, 0)
    assert (line["sent"], line["staleness"]) == (0, 1)
    assert pinned(run)


def test_the_link_takes_its_time():
    """24 bytes at 24 bytes/s and 0.5 s: trains from 1.5 to 9.5 s, and 3 s become 4.5 s."""
    slow = DeviceProfile(seconds_per_example=0.25, latency=0.5, down=float(BYTES))
    run = slow_and(3.0, slow)
    run.until(1)
    assert rebases(run) == {0: ((2, 1),)}
    run = slow_and(0.5, replace(slow, latency=2.0))
    run.until(1)
    # Trains from 3 s; there at 3.5 s.
    assert rebases(run) == {0: ((1, 1),)}
    run = slow_and(6.5, slow)
    run.until(1)
    # There at 8 s, in the last pass.
    assert rebases(run) == {}


def test_a_busy_server_sends_it_once_the_merge_is_done():
    """3 s, and 1.5 s for the merge: 2.25 passes."""
    run = slow_and(3.0, costs=ServerCosts(merge=1.5))
    run.until(1)
    assert rebases(run) == {0: ((3, 1),)}


def test_a_device_out_of_reach_gets_it_when_its_window_opens():
    """Open from 0 to 2 s and from 5 s on: the 8 s of training last until 11 s."""
    slow = DeviceProfile(
        seconds_per_example=0.25, windows=((0.0, 2.0), (5.0, 1000.0)), period=1000.0
    )
    run = slow_and(2.5, slow)
    run.until(1)
    # There at 5 s: 5 / 11 of 4 passes, as if they were spread evenly.
    assert rebases(run) == {0: ((2, 1),)}
    run = slow_and(2.5, replace(slow, windows=((0.0, 2.0), (9.0, 1000.0))))
    run.until(1)
    # There at 9 s of 15 s.
    assert rebases(run) == {0: ((3, 1),)}


def test_rounding_does_not_make_it_late():
    """Three of four passes are done at 0.264 s of 0.352 s; in floating point a hair more."""
    run = slow_and(0.264, DeviceProfile(seconds_per_example=0.011))
    run.until(1)
    assert rebases(run) == {0: ((3, 1),)}


# The update


def by_hand(client, task, segments):
    """Passes of the task's plan, each number of them from one of the models it was sent."""
    plan, steps = client.plan(task), -(-client.num_examples // SPEC.batch_size)
    models = [task.params, *(offer.params for offer in task.broadcasts)]
    begun, number, local = 0, segments[0][1], models[segments[0][1]].clone()
    for passes, following in [*segments[1:], (SPEC.local_epochs, None)]:
        part = Plan(*(rows[begun * steps : passes * steps] for rows in plan))
        local = local_update(MODEL, local, client.x, client.y, task.spec, part)
        begun = passes
        if following is not None:
            local = models[following] + (local - models[number])
            number = following
    return local - models[number]


@pytest.mark.parametrize("batched", [False, True])
def test_the_update_is_what_segments_by_hand_give(batched):
    devices = clients()
    run = slow_and(3.0, trainer=Batched(devices, 4) if batched else None)
    run.until(2)
    task, seen = run.server.open_tasks[0], []
    expected = by_hand(devices[0], task, [(0, 0), (2, 1), (3, 2)])
    inner = run.trainer.update
    run.trainer.update = lambda *args: seen.append(inner(*args)) or seen[-1]
    run.until(3)
    update = next(update for update in seen if update.task_id == 0)
    assert update.choice == 2
    assert torch.allclose(update.delta, expected, atol=1e-6)
    # It is not what it would have been without.
    plain = devices[0].perform(replace(task, broadcasts=()))
    assert not torch.allclose(update.delta, plain.delta, atol=1e-3)
    # Merged onto the newest model with the weight of a fresh update.
    head = torch.lerp(task.broadcasts[1].params, task.broadcasts[1].params + update.delta, 0.6)
    assert torch.allclose(run.server.store.head_params(), head, atol=1e-6)


def test_before_the_first_pass_it_is_as_if_it_had_been_sent_the_newer_model():
    client, base, newer = clients()[0], MODEL.init(3), MODEL.init(4)
    task = Task(0, 0, 0, MAIN, 0, SPEC, base, broadcasts=(Offer(MAIN, 1, newer),))
    update = client.perform(task, rebases=((0, 1),))
    plain = client.perform(replace(task, params=newer, broadcasts=()))
    assert torch.equal(update.delta, plain.delta)
    assert update.choice == 1


def test_models_that_were_sent_are_never_written_into():
    client, base, newer = clients()[0], MODEL.init(3), MODEL.init(4)
    task = Task(0, 0, 0, MAIN, 0, SPEC, base, broadcasts=(Offer(MAIN, 1, newer),))
    for rebases in ((), ((0, 1),), ((2, 1),)):
        client.perform(task, rebases=rebases)
        assert torch.equal(base, MODEL.init(3))
        assert torch.equal(newer, MODEL.init(4))


GOOD = torch.tensor([4.0, 0.0, -4.0, 0.0, 0.0, 0.0])


def client_of_good():
    """Its labels are the predictions of the model GOOD."""
    client = clients()[0]
    client.y = (MODEL.logits(GOOD, client.x)).argmax(1)
    return client


def test_a_device_that_chose_an_offer_ignores_broadcasts_of_its_old_lineage():
    client, offer = client_of_good(), Offer("other", 1, GOOD)
    task = Task(0, 0, 0, MAIN, 0, SPEC, -GOOD, offers=(offer,))
    chosen = client.perform(task)
    assert chosen.choice == 1
    renewed = replace(task, broadcasts=(Offer(MAIN, 2, -GOOD),))
    update = client.perform(renewed, rebases=((2, 2),))
    assert update.choice == 1
    assert torch.equal(update.delta, chosen.delta)


def test_a_device_that_stayed_takes_broadcasts_of_the_lineage_that_absorbed_its_own():
    client, offer = client_of_good(), Offer("other", 1, -GOOD)
    task = Task(0, 0, 0, "gone", 0, SPEC, GOOD, offers=(offer,))
    renewed = replace(task, broadcasts=(Offer("into", 2, GOOD / 2),))
    update = client.perform(renewed, rebases=((2, 2),))
    assert update.choice == 2


# Bytes, pins, losses, lateness


def test_its_bytes_are_on_the_downlink():
    run = slow_and(3.0)
    run.until(3)
    dispatched, broadcast = len(run.lines("dispatch")), len(run.lines("broadcast"))
    assert broadcast == 3
    assert [f["bytes"] for _, f in run.lines("broadcast")] == [BYTES] * 3
    assert run.engine.bytes_down == (dispatched + broadcast) * BYTES
    assert run.engine.bytes_up == 3 * BYTES


def test_sub_models_are_sent_their_part():
    part = Submodel("part", torch.tensor([0, 2, 5]))
    fleet = Fleet((DeviceProfile(seconds_per_task=8), DeviceProfile(seconds_per_task=3)), seed=0)
    plain = server()
    strategy = replace(plain.strategy, dispatch=Half(part))
    run = ToyRun(Server(torch.zeros(SIZE), strategy, SPEC, seed=7), fleet)
    run.until(1)
    (offer,) = run.server.open_tasks[0].broadcasts
    assert torch.equal(offer.params, take(run.server.store.head_params(), part))
    assert run.lines("broadcast")[0][1]["bytes"] == 3 * 4
    untouched = [1, 3, 4]
    before = run.server.store.head_params()[untouched]
    run.until(2)
    run.until(3)
    _, line = arrival(run, 0)
    assert (line["sent"], line["staleness"]) == (2, 0)
    assert not torch.equal(run.server.store.head_params()[untouched], before)  # by device 1


class Half(ImmediateDispatch):
    """Dispatch: device 0 trains a sub-model."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def __call__(self, view):
        for request in super().__call__(view):
            yield request._replace(submodel=self.part if request.device == 0 else None)


def fleet_of(count, **profile):
    return Fleet(
        tuple(
            DeviceProfile(seconds_per_example=0.02 * (1 + device) ** 1.5, **profile)
            for device in range(count)
        ),
        seed=4,
    )


def many(trainer=None, fleet=None, policy="always", count=6):
    trainer = (trainer or OneByOne)(clients(count))
    return ToyRun(server(policy), fleet or fleet_of(count), trainer=trainer)


def in_batches(devices):
    return Batched(devices, 3)


@pytest.mark.parametrize("trainer", [OneByOne, in_batches])
def test_all_versions_are_unpinned(trainer):
    run = many(trainer, fleet_of(6, crash=0.2, restart_seconds=0.5, detect_seconds=0.3))
    for updates in range(1, 80, 7):
        run.until(updates)
        assert pinned(run)
        open_tasks = set(run.server.open_tasks)
        assert set(run.engine.state()["trains"]) <= open_tasks
        assert set(rebases(run)) <= set(run.engine.state()["trains"])
    assert run.lines("drop")
    assert any(f["sent"] > 0 and f["staleness"] == 0 for _, f in run.lines("arrival"))


def test_a_lost_task_takes_no_broadcast():
    fleet = Fleet(
        (
            DeviceProfile(seconds_per_task=8, crash=1.0, detect_seconds=1, restart_seconds=1),
            DeviceProfile(seconds_per_task=1),
        ),
        seed=0,
    )
    run = ToyRun(server(), fleet, trainer=OneByOne(clients()))
    run.until(30)
    assert run.lines("drop")
    assert rebases(run) == {}
    assert pinned(run)


def test_a_task_whose_upload_is_under_way_gets_no_broadcast():
    """In flight: device 0 works on its next task while the upload of the first is late."""
    fleet = Fleet((DeviceProfile(seconds_per_task=8), DeviceProfile(seconds_per_task=1)), seed=0)
    fleet = with_lateness(fleet, [0], Lateness("in-flight", 20.0))
    run = ToyRun(server(), fleet, trainer=OneByOne(clients()))
    run.until(virtual_seconds=27.5)
    first, later = (run.server.open_tasks[i] for i in (0, max(run.server.open_tasks)))
    assert len(first.broadcasts) == 7  # one a second while it trained
    assert later.number > first.number
    run.until(virtual_seconds=28.5)
    _, line = arrival(run, 0)
    # It continued from the sixth commit, which it had at 6 s.
    assert line["sent"] == 6
    commits = [time for time, f in run.lines("commit") if f["version"] > 6 and time < 28]
    assert line["staleness"] in (len(commits), len(commits) + 1)
    assert pinned(run)


def test_a_device_that_accumulates_residuals_cannot_rebase():
    run = slow_and(3.0)
    run.server.spec = replace(SPEC, balance=0.5)
    run.until(3)
    _, line = arrival(run, 0)
    assert (line["sent"], line["staleness"]) == (0, 2)


# Trainers and checkpoints


@pytest.mark.parametrize("policy", ["always", "every-n"])
def test_one_by_one_and_in_batches_give_the_same(policy):
    alone, together = many(OneByOne, policy=policy), many(in_batches, policy=policy)
    for run in (alone, together):
        run.until(60)
    lines = [(time, kind, {**f, "weight": 0}) for time, kind, f in alone.log]
    assert lines == [(time, kind, {**f, "weight": 0}) for time, kind, f in together.log]
    assert any(f["sent"] for _, f in alone.lines("arrival"))
    one, two = (run.server.store.head_params() for run in (alone, together))
    assert (one - two).abs().max() / one.abs().max() < 1e-5


def test_a_result_of_a_batch_is_thrown_away_if_a_newer_model_comes_in_time():
    run = many(in_batches)
    waited = False
    for updates in range(1, 60):
        run.until(updates)
        ready, rebased = set(run.trainer._ready), set(rebases(run))
        waiting = {number for some in run.trainer._waiting.values() for number in some}
        assert not (ready | waiting) & rebased
        assert ready | waiting <= set(run.server.open_tasks)
        waited = waited or bool(rebased)
    assert waited


@pytest.mark.parametrize("trainer", [OneByOne, in_batches])
@pytest.mark.parametrize("after", [2, 30])
def test_a_checkpoint_in_mid_task_gives_the_same(trainer, after):
    whole, first = many(trainer), many(trainer)
    whole.until(after)
    first.until(after)
    assert rebases(first)
    second = first.carried_over(many(trainer))
    assert rebases(second) == rebases(first)
    assert second.engine.state()["trains"] == first.engine.state()["trains"]
    for updates in (after + 10, 70):
        whole.until(updates)
        second.until(updates)
        if trainer is in_batches:
            assert second.trainer._ready.keys() == whole.trainer._ready.keys()
    assert first.log + second.log == whole.log
    assert torch.equal(second.server.store.head_params(), whole.server.store.head_params())


# A broadcast to an idle device changes nothing but its base


def one_at_a_time(policy):
    """All others are idle whenever a model is merged."""
    fleet = Fleet((DeviceProfile(seconds_per_task=1),) * 4, seed=0)
    run = ToyRun(
        server(policy, ImmediateDispatch(concurrency=1)), fleet, trainer=OneByOne(clients(4))
    )
    run.until(30)
    return run


def test_a_broadcast_to_idle_devices_changes_nothing_but_their_base():
    always, never = one_at_a_time("always"), one_at_a_time("never")
    assert always.log == never.log
    assert always.heads() == never.heads()
    assert always.engine.bytes_down == never.engine.bytes_down
    # Their next base is the newest model either way.
    assert {f["staleness"] for _, f in always.lines("arrival")} == {0}
    assert [f["version"] for _, f in always.lines("dispatch")] == list(range(31))


def test_the_toy_trainer_continues_from_the_last_broadcast():
    """Strategies can be tried on the toy problem."""
    fleet = Fleet((DeviceProfile(seconds_per_task=8), DeviceProfile(seconds_per_task=3)), seed=0)
    run = ToyRun(server(), fleet, trainer=ToyTrainer())
    run.until(3)
    assert arrival(run, 0)[1]["sent"] == 2

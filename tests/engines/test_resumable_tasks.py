"""Tasks in parts: a broadcast reaches a device at work, on real nodes as in the simulation."""

import re
from dataclasses import replace

import pytest
import torch

from fake_grid import ToyFederation, ToyNode, revived, saved
from latecomer.core.messages import Offer, Task, TrainSpec
from latecomer.core.parts import Parts
from latecomer.core.strategy import Strategy
from latecomer.engines.resumable_tasks import ResumableTask
from latecomer.engines.wire import InvalidPayload, Progress, ResumeOrder
from latecomer.strategies.recipe import build_strategy
from toy import ToyRun, toy_fleet, toy_server

BAD = 4  # the slowest device, which hears the most


def both(passes, **options):
    """The virtual engine and the loop over the same nodes, with so many passes in a task."""
    virtual = ToyRun(toy_server("echopfl", options), toy_fleet())
    real = ToyFederation("echopfl", options=options)
    for run in (virtual, real):
        run.server.spec = replace(run.server.spec, local_epochs=passes)
    return virtual, real


@pytest.mark.parametrize("passes", [2, 4, 8])
@pytest.mark.parametrize("policy", ["always", "every-n", "predictor", "oracle"])
def test_the_models_are_those_of_the_simulation_to_the_bit(policy, passes):
    virtual, real = both(passes, broadcast=policy, broadcast_every=2)
    virtual.until(80)
    assert real.until(80) == "updates"
    assert real.heads() == virtual.heads()
    arrived = [
        [(time, {n: v for n, v in f.items() if n != "spans"}) for time, kind, f in run.log
         if kind == "arrival"]
        for run in (real, virtual)
    ]  # fmt: skip
    assert arrived[0] == arrived[1]
    assert not real.lines("refusal")
    assert not real.lines("drop")


def test_devices_do_go_on_from_newer_models():
    _, real = both(4, broadcast="always")
    real.until(80)
    given = {f["task"]: f["version"] for f in real.lines("dispatch")}
    renewed = [f for f in real.lines("arrival") if f["sent"] > given[f["task"]]]
    assert len(renewed) > 10
    assert real.lines("undelivered")  # to those whose last pass has begun


def test_all_versions_are_let_go():
    _, real = both(4, broadcast="always")
    for updates in range(5, 80, 5):
        real.until(updates)
        pinned = sorted(v for t in real.server.open_tasks.values() for v in t.versions)
        store = real.server.store
        assert sum(store.pins(v) for v in set(pinned)) == len(pinned)
        assert set(real.loop.in_flight.resumable) <= set(real.server.open_tasks)


@pytest.mark.parametrize("name", ["fedasync", "fedavg", "clusterfl", "ifca"])
def test_without_broadcasts_tasks_are_sent_whole(name):
    assert not Parts(build_strategy(name)).broadcasts
    assert not Parts(Strategy()).broadcasts
    assert not Parts(build_strategy("echopfl", {"broadcast": "never"})).broadcasts
    run = ToyFederation(name)
    run.until(20)
    assert not run.loop.in_flight.resumable


def test_a_restarted_server_takes_up_tasks_in_their_middle():
    _, first = both(8, broadcast="always")
    first.until(33)
    nodes = dict(first.transport.answers)
    assert any(node.done for node in nodes.values())
    second = revived(saved(first), nodes, strategy="echopfl", options={"broadcast": "always"})
    assert second.until(80) == "updates"
    tasks = [f["task"] for f in first.lines("arrival") + second.lines("arrival")]
    assert len(tasks) == len(set(tasks))
    refused = {f["reason"] for kind in ("refusal", "drop") for f in second.lines(kind)}
    # What a forgotten life has broadcast is not mistaken for anything else.
    assert refused <= {"refused: the update is from a model that this server has not sent"}


class FaultyNode(ToyNode):
    falsify = staticmethod(lambda progress: progress)

    def progress(self):
        return self.falsify(super().progress())


def with_fields(**fields):
    return lambda valid: replace(valid, fields={**valid.fields, **fields})


FAULTS = {
    "it has not begun": (with_fields(passes=0), "passes must be"),
    "it has done all": (with_fields(passes=4), "passes must be"),
    "it has done too much": (with_fields(passes=10**9), "passes must be"),
    "half a pass": (with_fields(passes=0.5), "passes"),
    "true": (with_fields(passes=True), "passes"),
    "another task": (with_fields(task="s-0"), "another task"),
    "a model it was not sent": (with_fields(choice=1, base="s-1"), "has not sent|another"),
    "a model without a name": (with_fields(choice=7), "has not sent"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_false_progress_report_is_refused(name):
    falsify, reason = FAULTS[name]
    node = FaultyNode(f"toy-{BAD}")
    node.falsify = falsify
    run = ToyFederation("echopfl", {BAD: node}, options={"broadcast": "every-n"})
    run.server.spec = replace(run.server.spec, local_epochs=4)
    assert run.until(40) == "updates"
    refused = run.lines("drop")
    assert refused
    assert {f["device"] for f in refused} == {BAD}
    assert all(re.search(reason, f["reason"]) for f in refused)


def test_a_device_that_has_lost_its_state_fails_the_task():
    class LosesState(ToyNode):
        def resume(self, given):
            self.order = None
            return super().resume(given)

    run = ToyFederation(
        "echopfl", {BAD: LosesState(f"toy-{BAD}")}, options={"broadcast": "every-n"}
    )
    run.server.spec = replace(run.server.spec, local_epochs=4)
    assert run.until(40) == "updates"
    assert run.lines("drop")
    assert all("not in the middle" in f["reason"] for f in run.lines("drop"))


def test_a_node_that_goes_in_mid_task_goes_on_when_it_is_back():
    _, run = both(8, broadcast="always")
    run.until(12)
    node = run.transport.answers.pop(BAD)
    task = run.server.working[BAD]
    run.until(20)
    run.transport.answers[BAD + 5] = node
    run.until(60)
    assert run.lines("return") == [{"device": BAD}]
    assert task in [f["task"] for f in run.lines("arrival") if f["device"] == BAD]


# ResumableTask itself.


def a_task(offers=(), broadcasts=()):
    return Task(0, 0, 0, "main", 0, TrainSpec(local_epochs=4), torch.zeros(2),
                offers=offers, broadcasts=broadcasts)  # fmt: skip


def test_only_the_newest_is_sent_and_each_once():
    one, two = (Offer("main", v, torch.full((2,), float(v))) for v in (1, 2))
    resumable, task = ResumableTask(4), a_task(broadcasts=(one, two))
    resumable.broadcast(1, "s-1")
    resumable.broadcast(2, "s-2")
    assert resumable.usable == (2,)
    sent = resumable.next_order(task, "k")
    assert (sent.until, sent.number, sent.name) == (2, 2, "s-2")
    assert torch.equal(sent.newer, two.params)
    resumable.confirm(Progress(2, 2, "s-2"))
    assert resumable.usable == (2,)
    assert resumable.next_order(task, "k") == ResumeOrder("k", 3)


def test_a_newer_model_of_another_lineage_names_its_offer():
    other = Offer("other", 1, torch.ones(2))
    resumable = ResumableTask(4)
    resumable.broadcast(2, "s-2")
    news = Offer("other", 3, torch.ones(2))
    assert resumable.next_order(a_task((other,), (news,)), "k").offer == 1


def test_a_sent_model_stays_usable_until_the_next_progress_report():
    resumable, task = ResumableTask(4), a_task(broadcasts=(Offer("main", 1, torch.ones(2)),) * 2)
    resumable.broadcast(1, "s-1")
    resumable.next_order(task, "k")
    resumable.broadcast(2, "s-2")
    assert resumable.usable == (1, 2)
    resumable.confirm(Progress(2))  # it has not taken the model
    assert resumable.usable == (2,)


def test_an_old_progress_report_is_refused():
    resumable = ResumableTask(4, until=3)
    with pytest.raises(InvalidPayload, match="passes must be 3 to 3"):
        resumable.confirm(Progress(2))

"""Malicious nodes beyond malformed replies: numbers of examples, names, floods."""

from dataclasses import replace

import pytest
import torch

from fake_grid import FakeTransport, ToyFederation, ToyNode
from latecomer.core.checks import Checks
from latecomer.core.messages import Task, TrainSpec, Update
from latecomer.engines import device_registry
from latecomer.engines.deployment_loop import DeploymentLoop, Timeouts
from latecomer.engines.transport import Delivery
from latecomer.engines.virtual import Bounds
from latecomer.engines.wire import Introduction, Payload, encode_introduction, pack
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.profile import DeviceProfile
from latecomer.study.config import parse
from latecomer.study.experiment import Experiment
from toy import SIZE, ToyRun, ToyTrainer, toy_fleet, toy_server

BAD = 2


class Claims(ToyNode):
    """Claims `claim` examples from its sixth task on."""

    claim = 10**6

    def reply(self, valid):
        if len(self.asked) < 6:
            return valid
        return replace(valid, metrics={**valid.metrics, "num-examples": self.claim})


def test_a_million_examples_are_not_believed():
    run = ToyFederation("fedavg", {BAD: Claims(f"toy-{BAD}")})
    run.until(60)
    reasons = {f["reason"] for f in run.lines("refusal")}
    assert reasons == {"num_examples = 1,000,000 exceeds 1,000 (100 x the median)"}
    assert all(abs(value) < 6 for value in run.heads()["main"])


class Poisons(ToyNode):
    """Its first six updates are `value`, 2 `value` and so on in every coordinate."""

    value = 50.0

    def reply(self, valid):
        if len(self.asked) > 6:
            return valid
        return replace(valid, array=pack(torch.full((SIZE,), self.value * len(self.asked))))


def poisoned(value):
    """A run whose fastest node is hostile."""
    node = Poisons("toy-0")
    node.value = value
    run = ToyFederation("fedasync", {0: node})
    return run, run.until(150)


def test_a_hostile_first_update_is_refused_and_its_device_put_into_quarantine():
    run, ended_by = poisoned(1e6)
    assert ended_by == "updates"
    assert {f["device"] for f in run.lines("refusal")} == {0}
    (first, *_) = run.lines("quarantine")
    assert (first["device"], first["until"] >= 20) == (0, True)
    assert not run.lines("rollback")
    assert all(abs(value) < 6 for value in run.heads()["main"])


def test_a_hostile_first_update_that_passed_is_rolled_back():
    run, ended_by = poisoned(19.9)  # 20 passes for a model of zeros, then more
    assert ended_by == "updates"
    (back,) = run.lines("rollback")
    assert back["to"] == 0
    assert {f["device"] for f in run.lines("quarantine")} == {0}
    assert all(abs(value) < 6 for value in run.heads()["main"])


class ClaimsAndFlips(ToyTrainer):
    """Device `BAD` claims 10^9 examples and sends the negative of its update."""

    def update(self, task, rebases=()):
        made = super().update(task, rebases)
        if task.device != BAD:
            return made
        return replace(made, delta=-made.delta, num_examples=10**9)


PROTECTION = ("refusal", "quarantine", "rollback")


@pytest.mark.parametrize("strategy", ["fedavg", "fedasync", "fedbuff"])
def test_simulation_and_deployment_protect_the_model_alike(strategy):
    virtual = ToyRun(toy_server(strategy), toy_fleet(), trainer=ClaimsAndFlips())
    nodes = {i: ToyNode(f"toy-{i}", trainer=ClaimsAndFlips()) for i in range(5)}
    deployed = ToyFederation(strategy, nodes)
    logs = []
    for run in (virtual, deployed):
        run.until(60)
        logs.append([(kind, line) for _, kind, line in run.log if kind in PROTECTION])
    seen = [[(kind, line.get("device"), line["reason"]) for kind, line in log] for log in logs]
    assert seen[0] == seen[1]
    assert ("rollback", None) in {each[:2] for each in seen[0]}
    assert {device for kind, device, _ in seen[0] if kind == "quarantine"} == {BAD}
    for run in (virtual, deployed):  # not equal: a deployment gives refused devices a pause
        assert all(0 < value < 4 for value in run.heads()["main"])


def test_an_experiment_has_the_checks_of_a_server_without_a_config():
    checks, default = Experiment(parse({})).server().checks, Checks()
    for name in ("norm_ratio", "examples_ratio", "max_examples", "window", "warmup", "stop"):
        assert getattr(checks, name) == getattr(default, name)


def test_the_operator_may_know_better_from_the_start():
    run = ToyFederation("fedasync", {BAD: Claims(f"toy-{BAD}")})
    run.server.checks = Checks(max_examples=5)
    ended_by = run.until(virtual_seconds=1000.0)
    assert not run.lines("arrival")
    assert {f["reason"] for f in run.lines("refusal")} == {
        "num_examples must be a whole number from 1 to 5"
    }
    assert len(run.lines("rollback")) == 4
    assert "devices were refused: num_examples must be a whole number from 1 to 5;" in ended_by


def test_the_bounds_come_out_of_a_checkpoint():
    first = ToyFederation()
    first.until(40)
    again = Checks()
    again.restore(first.server.checks.state())
    assert again.state() == first.server.checks.state()
    task = Task(0, 0, 0, "main", 0, TrainSpec(), torch.zeros(1))
    assert again.reason_to_refuse(task, Update(0, None, 1000)) is None
    assert "exceeds 1,000" in again.reason_to_refuse(task, Update(0, None, 1001))


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "../up", "a\nb", "<script>", "-x", "ä", "x" * 101, ".hidden"]
)
def test_a_name_that_is_none_gets_no_task(name):
    class Named(ToyNode):
        def __call__(self, kind, payload):
            return encode_introduction(Introduction(name, "k"))

    run = ToyFederation(nodes={BAD: Named("x")})
    run.until(20)
    assert BAD not in {node for _, node, kind in run.transport.sent if kind == "train"}
    assert "needs a key, and a name" in run.lines("refusal")[0]["reason"]


def test_names_cannot_be_made_up_without_end(monkeypatch):
    monkeypatch.setattr(device_registry, "MAX_DEVICES", 6)
    run = ToyFederation(nodes={100 + i: ToyNode(f"made-up-{i}") for i in range(5)})
    run.until(20)
    assert len(run.lines("introduction")) == 6
    assert {f["reason"] for f in run.lines("refusal")} == {
        "no introduction: there are 6 devices already"
    }


def test_nodes_that_come_and_go_leave_nothing_behind():
    run = ToyFederation(timeouts=Timeouts(node_poll=0.5))
    for number in range(30):
        run.transport.answers[1000 + number] = lambda kind, payload: Payload({})
        run.until(virtual_seconds=run.loop.now + 1.0)
        del run.transport.answers[1000 + number]
    run.until(virtual_seconds=run.loop.now + 1.0)
    assert len(run.loop.registry.nodes) == 5
    assert not run.loop.registry.failures
    assert len(run.loop.in_flight.open) <= 5


def times(fast):
    """Arrival times, with or without a device that replies a hundred times per second."""
    profiles = [DeviceProfile(seconds_per_task=i + 1.0) for i in range(5)]
    nodes = {i: ToyNode(f"toy-{i}") for i in range(5)}
    if fast:
        profiles.append(DeviceProfile(seconds_per_task=0.01))
        nodes[5] = ToyNode("flood")
    log = []
    loop = DeploymentLoop(
        toy_server("fedasync"),
        FakeTransport(Fleet(tuple(profiles), seed=3), nodes),
        on_note=lambda time, note: log.append((time, note.kind, note.fields.get("device"))),
    )
    loop.run(Bounds(virtual_seconds=20.0))
    arrived = [(round(time, 3), device) for time, kind, device in log if kind == "arrival"]
    return arrived, loop


def test_a_flood_from_one_node_delays_no_other():
    alone, _ = times(fast=False)
    beside, loop = times(fast=True)
    assert len(beside) > 1000
    assert [each for each in beside if each[1] != 5] == alone
    assert len(loop.in_flight.open) <= 6


def test_any_number_of_replies_without_a_message_is_refused():
    run = ToyFederation()
    run.until(5)
    huge = Payload({"task": "s-1"}, {"num-examples": 1}, pack(torch.ones(SIZE)))
    for i in range(2000):
        run.transport.again(Delivery(f"made-up-{i}", huge))
    before = run.server.accepted
    run.until(20)
    assert len(run.lines("refusal")) == 2000
    assert [f["task"] for f in run.lines("arrival")[before:]] == sorted(
        {f["task"] for f in run.lines("arrival")[before:]},
        key=[f["task"] for f in run.lines("arrival")].index,
    )
    assert len(run.loop.in_flight.open) <= 5

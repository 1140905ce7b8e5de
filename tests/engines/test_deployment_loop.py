"""The deployment loop with nodes that connect, disconnect, fail and send invalid replies."""

import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from fake_grid import ToyFederation, ToyNode, revived, saved
from latecomer.core.messages import ServingSettings
from latecomer.engines.deployment_loop import Timeouts
from latecomer.engines.transport import Delivery
from latecomer.engines.wire import Packed, Payload, decode_task, pack
from latecomer.strategies.parts.personalisation import personalised
from latecomer.strategies.recipe import recipes
from toy import SIZE, ToyTrainer, server_of, toy_strategy

BAD = 2  # the node that misbehaves


class FaultyNode(ToyNode):
    """Replies with `falsify` of the valid reply."""

    falsify = staticmethod(lambda valid: valid)

    def reply(self, valid):
        return self.falsify(valid)


def faulty(falsify):
    node = FaultyNode(f"toy-{BAD}")
    node.falsify = falsify
    return node


def with_fields(**fields):
    names = {name.replace("_", "-"): value for name, value in fields.items()}
    return lambda valid: replace(valid, fields={**valid.fields, **names})


def with_metrics(**metrics):
    names = {name.replace("_", "-"): value for name, value in metrics.items()}
    return lambda valid: replace(valid, metrics={**valid.metrics, **names})


def with_array(array):
    return lambda valid: replace(valid, array=array)


def without(field):
    def falsify(valid):
        return replace(valid, fields={n: v for n, v in valid.fields.items() if n != field})

    return falsify


NAN = pack(torch.full((SIZE,), float("nan")))
FAULTS = {
    "too long": (with_array(pack(torch.ones(SIZE + 1))), "shape"),
    "two rows": (with_array(pack(torch.ones(SIZE), torch.ones(SIZE))), "shape"),
    "float64": (with_array(Packed("float64", (1, SIZE), b"x")), "float64"),
    "objects": (
        with_array(Packed("float32", (1, SIZE), b"\x80\x04." * 40)),
        "do not match its dtype",
    ),
    "no array": (with_array(None), "array is missing"),
    "nan": (with_array(NAN), "not finite"),
    "huge": (with_array(pack(torch.full((SIZE,), 3e38))), "not finite|norm"),
    "another task": (with_fields(task="s-0"), "for another task"),
    "negative examples": (with_metrics(num_examples=-5), "num_examples"),
    "a million million examples": (with_metrics(num_examples=10**12), "num_examples"),
    "true examples": (with_metrics(num_examples=True), "num_examples"),
    "a metric that is true": (with_metrics(loss=True), "metric"),
    "a metric that is a text": (with_metrics(loss="low"), "metric"),
    "a metric that is a list": (with_metrics(loss=[1.0]), "metric"),
    "a metric that is nan": (with_metrics(loss=float("nan")), "metric"),
    "negative noise": (with_fields(noise_std=-1.0), "noise_std"),
    "a choice it did not have": (with_fields(choice=1), "choice"),
    "a negative choice": (with_fields(choice=-1), "choice"),
    "a choice that is a text": (with_fields(choice="0"), "choice"),
    "epsilon infinite": (with_fields(epsilon=float("inf")), "epsilon"),
    "last that is a text": (with_fields(last="yes"), "last"),
    "no task": (without("task"), "task"),
    "no epsilon": (without("epsilon"), "epsilon"),
    "nothing": (lambda valid: Payload({}), "task"),
    "a numpy array for metrics": (with_metrics(loss=np.ones(3)), "metric"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_invalid_reply_is_refused_with_a_reason_and_others_continue(name):
    falsify, reason = FAULTS[name]
    run = ToyFederation(nodes={BAD: faulty(falsify)})
    assert run.until(40) == "updates"
    refused = [f for kind in ("refusal", "drop") for f in run.lines(kind)]
    assert refused
    assert all(f["device"] == BAD for f in refused)
    assert all(re.search(reason, f["reason"]) for f in refused)
    assert {f["device"] for f in run.lines("arrival")} == {0, 1, 3, 4}
    assert all(np.isfinite(head).all() for head in run.heads().values())


@pytest.mark.parametrize("name", ["nan", "no array"])
def test_a_faulty_device_gets_tasks_at_growing_intervals(name):
    run = ToyFederation(nodes={BAD: faulty(FAULTS[name][0])}, timeouts=Timeouts(back_off=4.0))
    run.until(virtual_seconds=200.0)
    asked = [time for time, node, kind in run.transport.sent if node == BAD and kind == "train"]
    gaps = np.diff(asked)
    assert 4 <= len(asked) <= 8
    assert (np.diff(gaps) > 0).all()


def test_bytes_are_counted_in_both_directions():
    run = ToyFederation(nodes={BAD: faulty(FAULTS["nan"][0])})
    run.until(20)
    received = run.lines("arrival") + run.lines("refusal")
    sent = [kind for _, _, kind in run.transport.sent if kind == "train"]
    assert run.loop.shared.bytes_up == len(received) * 4 * SIZE
    assert run.loop.shared.bytes_down == len(sent) * 4 * SIZE


def test_a_node_that_recovers_is_used_again():
    errors = iter(["the client raised an error"] * 2)
    run = ToyFederation(nodes={BAD: faulty(lambda valid: next(errors, valid))})
    run.until(60)
    assert [f["reason"] for f in run.lines("drop")] == ["the client raised an error"] * 2
    assert BAD in {f["device"] for f in run.lines("arrival")}
    assert run.loop.registry.devices[BAD].failures == 0


@dataclass
class RecordsSettings(ToyNode):
    """Records the serving settings of the tasks that it is sent."""

    settings: list[ServingSettings | None] = field(default_factory=list)

    def __call__(self, kind, payload):
        if kind == "train" and "resume" not in payload.fields:
            self.settings.append(decode_task(payload, lambda name: (None, SIZE)).serving)
        return super().__call__(kind, payload)


class ReportsShares(ToyTrainer):
    """Every device has three examples of class 0 for one of class 1."""

    def update(self, task, rebases=()):
        return replace(super().update(task, rebases), metrics={"share_0": 0.75, "share_1": 0.25})


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff", "echopfl", "latecomer"])
def test_tasks_carry_the_serving_settings(strategy, monkeypatch):
    def server(name, options):
        return server_of(personalised(toy_strategy(name, options), True, 2))

    monkeypatch.setattr("fake_grid.toy_server", server)
    node = RecordsSettings("toy-0", trainer=ReportsShares())
    run = ToyFederation(strategy, nodes={0: node})
    run.until(40)
    assert node.settings[0] == ServingSettings(True, 2)
    assert node.settings[-1] == ServingSettings(True, 2, (0.75, 0.25))


def test_without_personalisation_the_model_is_used_as_it_is_sent():
    plain = RecordsSettings("toy-0")
    ToyFederation("fedasync", nodes={0: plain}).until(10)
    assert set(plain.settings) == {ServingSettings()}


@pytest.mark.parametrize("strategy", sorted(recipes()))
def test_strange_but_lawful_metrics_break_no_strategy(strategy):
    odd = {"loss_rms": -1e300, "feedback": 1e300, "error": -5, "loss_0": -1e300, "soft_0": 1e300}
    nodes = {BAD: faulty(with_metrics(**odd)), 3: ToyNode("toy-3")}
    nodes[BAD].falsify = lambda valid: replace(valid, metrics={**valid.metrics, **odd})
    run = ToyFederation(strategy, nodes=nodes)
    assert run.until(60) == "updates"


def test_an_answer_counts_once():
    run = ToyFederation()
    run.until(5)
    seen = []
    collect = run.transport.collect

    def twice(until):
        found = collect(until)
        seen.extend(found)
        return found + found[:1]

    run.transport.collect = twice
    run.until(20)
    tasks = [f["task"] for f in run.lines("arrival")]
    assert len(tasks) == len(set(tasks))
    assert all(f["reason"] == "the reply answers no open message" for f in run.lines("refusal"))
    assert run.lines("refusal")


def test_a_reply_without_a_message_is_refused():
    run = ToyFederation()
    run.until(3)
    run.transport.again(Delivery("m999", Payload({"task": "s-1"})))
    run.until(6)
    assert run.lines("refusal") == [
        {"device": None, "task": None, "reason": "the reply answers no open message"}
    ]


def test_a_node_without_an_introduction_gets_no_task():
    run = ToyFederation(nodes={BAD: lambda kind, payload: Payload({"name": 5})})
    run.until(40)
    assert BAD not in {node for _, node, kind in run.transport.sent if kind == "train"}
    assert "no introduction" in run.lines("refusal")[0]["reason"]
    assert run.lines("refusal")[0]["node"] == BAD


def test_a_node_cannot_take_the_name_of_another_device():
    run = ToyFederation(nodes={9: ToyNode("toy-0", key="guessed")})
    run.until(40)
    assert 9 not in {node for _, node, kind in run.transport.sent if kind == "train"}
    assert "another key" in run.lines("refusal")[0]["reason"]


def test_a_rejected_push_is_tried_again_later():
    run = ToyFederation()
    run.until(5)
    run.transport.rejects.add(0)
    run.until(20)
    assert {f["reason"] for f in run.lines("drop")} == {"the message was not taken"}
    run.transport.rejects.clear()
    before = len(run.lines("arrival"))
    run.until(80)
    assert 0 in {f["device"] for f in run.lines("arrival")[before:]}


def test_a_device_keeps_its_number_under_a_new_node():
    """A node that restarts without a key comes back under another id."""
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)})
    run.until(10)
    silent = run.transport.answers.pop(BAD)
    run.transport.answers[BAD + 5] = ToyNode(f"toy-{BAD}")
    run.until(40)
    arrived = [f for f in run.lines("arrival") if f["device"] == BAD]
    assert arrived
    assert len(run.lines("introduction")) == 5
    assert run.lines("return") == [{"device": BAD}]
    # The task that it had is sent again, not another one.
    assert run.transport.answers[BAD + 5].asked[0] == silent.asked[0]
    assert not run.lines("refusal")


def test_a_node_whose_loss_is_noticed_late_is_no_trouble():
    """A real SuperLink lists a dead node for a minute and then reports the loss."""
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)})
    run.until(10)
    (message,) = [m for m, f in run.loop.in_flight.open.items() if f.device == BAD]
    run.transport.answers[BAD + 5] = ToyNode(f"toy-{BAD}")
    run.until(30)
    run.transport.again(Delivery(message, error="the node is not available"))
    run.until(40)
    del run.transport.answers[BAD]
    run.until(60)
    assert not [f for kind in ("refusal", "drop") for f in run.lines(kind)]
    assert sum(node == BAD for _, node, _ in run.transport.sent) == 2  # a greeting and a task
    assert len([f for f in run.lines("arrival") if f["device"] == BAD]) > 5


def lost_node(**options):
    """A run whose node BAD is lost with a task, and that node."""
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)}, **options)
    run.until(virtual_seconds=500.0)
    silent = run.transport.answers[BAD]
    (message,) = [m for m, f in run.loop.in_flight.open.items() if f.device == BAD]
    run.transport.again(Delivery(message, error="the node is not available", lost=True))
    return run, silent


def test_a_device_that_was_lost_comes_back_to_its_task():
    """With a key it comes back under the same number, perhaps before we have seen it go."""
    run, silent = lost_node()
    run.transport.answers[BAD] = back = ToyNode(f"toy-{BAD}")
    run.until(virtual_seconds=600.0)
    assert [f["device"] for f in run.lines("away")] == [BAD]
    assert back.asked[0] == silent.asked[0]
    assert not run.lines("drop")
    tasks = [f["task"] for f in run.lines("arrival") if f["device"] == BAD]
    assert len(tasks) == len(set(tasks)) > 1


def test_a_device_that_was_lost_leaves_its_place_to_others_at_once():
    run, _ = lost_node(options={"concurrency": 1}, timeouts=Timeouts(overdue=1e9))
    before = run.server.accepted
    run.until(virtual_seconds=600.0)
    assert run.server.accepted > before


def test_a_device_that_stays_away_loses_its_task():
    run, _ = lost_node(timeouts=Timeouts(away=20.0))
    del run.transport.answers[BAD]
    run.until(virtual_seconds=600.0)
    assert [f["reason"] for f in run.lines("drop")] == ["its device has not come back"]


def test_a_node_that_was_never_seen_to_go_is_asked_and_sent_its_task_again():
    """With its key a node may be back under its number at the very moment it is given up."""
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)})
    run.until(virtual_seconds=100.0)
    silent = run.transport.answers[BAD]
    run.transport.answers[BAD] = back = ToyNode(f"toy-{BAD}")
    run.transport.busy_until[BAD] = 0.0
    run.until(virtual_seconds=500.0)
    assert [f["reason"] for f in run.lines("away")] == ["the node has lost the task"]
    assert back.asked[0] == silent.asked[0]
    assert not run.lines("drop")


def test_a_node_at_work_for_long_is_asked_once_and_left_in_peace():
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)})
    run.until(virtual_seconds=3000.0)
    assert [kind for _, node, kind in run.transport.sent if node == BAD] == [
        "query",
        "train",
        "query",
    ]
    assert not run.lines("away")


def test_two_answers_to_one_task_at_one_moment_count_once():
    answers = []
    run = ToyFederation(nodes={BAD: faulty(lambda valid: answers.append(valid))})
    run.until(10)
    (old,) = [m for m, f in run.loop.in_flight.open.items() if f.device == BAD]
    run.transport.answers[BAD + 5] = faulty(lambda valid: answers.append(valid))
    run.until(20)
    (new,) = [m for m, f in run.loop.in_flight.open.items() if f.device == BAD and m != old]
    for message, answer in zip((old, new), answers, strict=True):
        run.transport.again(Delivery(message, answer))
    run.until(30)
    assert [f["reason"] for f in run.lines("refusal")] == ["the task is unknown or already closed"]
    assert len([f for f in run.lines("arrival") if f["device"] == BAD]) == 1


def test_an_overdue_task_makes_room_and_its_answer_is_still_used():
    timeouts = Timeouts(overdue=10.0, node_poll=1.0)
    slow = ToyFederation(
        nodes={BAD: faulty(lambda valid: None)}, timeouts=timeouts, options={"concurrency": 1}
    )
    slow.until(15)
    assert [f["device"] for f in slow.lines("overdue")] == [BAD]
    (message, sent), *_ = [
        (m, f)
        for m, f in slow.loop.in_flight.open.items()
        if f.device == BAD and f.task is not None
    ]
    key = slow.loop.in_flight.keys[sent.task]
    late = ToyNode("x").reply(
        Payload(
            {"task": key, "skipped": False, "noise-std": 0.0, "choice": 0, "epsilon": 0.0,
             "last": False},
            {"num-examples": 3},
            pack(torch.ones(SIZE)),
        )
    )  # fmt: skip
    slow.transport.answers[BAD] = ToyNode(f"toy-{BAD}")
    slow.transport.again(Delivery(message, late))
    before = slow.server.accepted
    slow.until(before + 1)
    (line,) = [f for f in slow.lines("arrival") if f["device"] == BAD]
    assert line["task"] == sent.task
    assert line["staleness"] > 5
    slow.until(before + 30)
    assert len([f for f in slow.lines("arrival") if f["device"] == BAD]) > 1


def test_a_task_is_given_up_in_the_end():
    timeouts = Timeouts(overdue=10.0, give_up=30.0)
    run = ToyFederation(nodes={BAD: faulty(lambda valid: None)}, timeouts=timeouts)
    run.until(virtual_seconds=40.0)
    assert [f["reason"] for f in run.lines("drop")] == ["no reply within 30 s"]
    assert len(run.server.open_tasks) <= 5


# Restarts of the server.


@pytest.mark.parametrize("strategy", sorted(recipes()))
def test_a_restarted_server_goes_on_from_its_checkpoint(strategy):
    first = ToyFederation(strategy)
    first.until(23)
    commits, accepted, now = first.server.store.commits, first.server.accepted, first.loop.now
    opened = {first.loop.in_flight.keys[task] for task in first.server.open_tasks}
    nodes = dict(first.transport.answers)
    asked = {i: len(node.asked) for i, node in nodes.items()}
    second = revived(saved(first), nodes, strategy=strategy)
    assert second.loop.now == now
    assert second.until(60) == "updates"
    assert second.server.store.commits >= commits
    assert second.server.accepted == 60 > accepted
    assert not second.lines("introduction")  # all are known by name
    again = {key for i, node in nodes.items() for key in node.asked[asked[i] :]}
    assert opened <= again
    tasks = [f["task"] for f in first.lines("arrival") + second.lines("arrival")]
    assert len(tasks) == len(set(tasks))


def test_what_was_given_after_the_checkpoint_is_never_mistaken_for_something_else():
    first = ToyFederation()
    first.until(10)
    state = saved(first)
    first.until(20)  # and then it is killed: these are forgotten
    second = revived(state, dict(first.transport.answers))
    before = {key for node in first.transport.answers.values() for key in node.asked}
    known = set(second.loop.in_flight.keys.values())
    second.until(30)
    new = {key for node in second.transport.answers.values() for key in node.asked} - before
    assert all(key.startswith("t-") for key in new)
    assert known <= before


def test_a_device_that_does_not_come_back_loses_its_place():
    first = ToyFederation(options={"concurrency": 2})
    first.until(10)
    (gone, *_) = first.server.working
    second = revived(saved(first), None, timeouts=Timeouts(overdue=20.0, give_up=50.0),
                     options={"concurrency": 2})  # fmt: skip
    del second.transport.answers[gone]
    second.until(virtual_seconds=second.loop.now + 40)
    assert gone in [f["device"] for f in second.lines("overdue")]
    assert gone not in second.server.working
    second.until(virtual_seconds=second.loop.now + 40)
    assert "its device has not come back" in [f["reason"] for f in second.lines("drop")]

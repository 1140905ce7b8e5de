"""Lineages that open and close, and broadcasts, as the server carries them out."""

import json

import torch

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Broadcast,
    Failed,
    Joined,
    Left,
    Send,
    TrainSpec,
    Update,
)
from latecomer.core.outcomes import Outcome
from latecomer.core.server import Server
from latecomer.core.strategy import Absorb, Assignment, BroadcastHead, Mix, Split, Strategy
from toy import SIZE


class Scripted(Mix):
    """Merge: each update at once; its actions are those put in."""

    def __init__(self):
        self.requests, self.heard = [], []

    def act(self, view):
        while self.requests:
            yield self.requests.pop(0)

    def on_fork(self, parent, child):
        self.heard.append(("fork", parent, child))

    def on_absorb(self, into, gone):
        self.heard.append(("absorb", into, gone))


def full(value):
    return torch.full((SIZE,), float(value))


class Talk:
    def __init__(self, devices=3, dispatch=None):
        parts = {"merge": Scripted(), "weigh": lambda contribution, view: 0.5}
        if dispatch:
            parts["dispatch"] = dispatch
        self.server = Server(full(0), Strategy(**parts), TrainSpec(), seed=1)
        self.script = self.server.strategy.merge
        self.tasks, self.notes, self.broadcasts = {}, [], []
        self.hear(*(Joined(device) for device in range(devices)))

    def hear(self, *events):
        for command in self.server.handle(*events):
            if isinstance(command, Send):
                self.tasks[command.task.device] = command.task
            elif isinstance(command, Broadcast):
                self.broadcasts.append([task.device for task in command.tasks])
            elif isinstance(command, Outcome):
                self.notes.append((command.kind, command.fields))

    def request(self, *requests):
        self.script.requests += requests
        self.hear(Left(99))

    def answer(self, device, value, choice=0, task=None):
        task = task or self.tasks[device]
        update = Update(task.id, torch.full_like(task.params, value), 5, choice=choice)
        self.hear(Arrived(device, update))
        return next(f for kind, f in reversed(self.notes) if kind in ("arrival", "refusal"))

    def lines(self, kind):
        return [fields for k, fields in self.notes if k == kind]

    def pins(self):
        sent = [v for task in self.server.open_tasks.values() for v in task.versions]
        store = self.server.store
        return all(store.pins(v) == sent.count(v) for v in store.versions)


def test_a_split_takes_its_devices_along():
    talk = Talk()
    talk.request(Split(MAIN, "child", (1, 2)))
    assert [talk.server.lineage_of(device) for device in range(3)] == [MAIN, "child", "child"]
    assert talk.server.clusters() == {MAIN: [0], "child": [1, 2]}
    assert talk.script.heard == [("fork", MAIN, "child")]
    assert talk.lines("split") == [{"lineage": MAIN, "into": "child", "devices": [1, 2]}]
    # What was sent before the split is of the parent, and is routed there.
    assert talk.answer(1, 1.0)["lineage"] == MAIN


def test_an_absorption_is_a_commit_and_takes_everybody_along():
    talk = Talk()
    talk.request(Split(MAIN, "child", (1, 2)))
    talk.request(Absorb(MAIN, "child", full(5)))
    store = talk.server.store
    assert torch.equal(store.head_params(), full(5))
    assert store.lineages == (MAIN,)
    assert talk.server.clusters() == {MAIN: [0, 1, 2]}
    assert talk.lines("commit") == [{"lineage": MAIN, "version": 1, "updates": 0}]
    assert talk.lines("merge") == [{"lineage": "child", "into": MAIN}]
    assert talk.script.heard[-1] == ("absorb", MAIN, "child")


def on_child():
    """Device 1 works on version 1 as the child's; the main one stands there, too."""
    talk = Talk()
    talk.answer(0, 1.0)
    talk.request(Split(MAIN, "child", (1,)))
    late = talk.tasks[1]
    talk.hear(Failed(late.id, "lost"), Joined(1))
    return talk


def test_a_broadcast_reaches_those_whose_lineage_was_absorbed():
    talk = on_child()
    task = talk.tasks[1]
    assert task.lineage == "child"
    talk.request(Absorb(MAIN, "child", full(5)), BroadcastHead(MAIN))
    assert [sorted(devices) for devices in talk.broadcasts] == [[0, 1, 2]]
    version = talk.server.store.head()
    assert task.broadcasts[-1].version == version
    assert task.broadcasts[-1].lineage == MAIN
    line = talk.answer(1, 1.0, choice=1)
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, version, 0)
    # Half-way from 5 to 6.
    assert torch.equal(talk.server.store.head_params(), full(5.5))
    assert talk.pins()


def test_without_the_newer_model_its_staleness_is_counted_where_it_goes():
    talk = on_child()
    task = talk.tasks[1]
    talk.request(Absorb(MAIN, "child", full(5)), BroadcastHead(MAIN))
    talk.answer(2, 1.0)
    since = talk.server.store.staleness(task.version, MAIN)
    line = talk.answer(1, 1.0, choice=0)
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, task.version, since)
    assert since == 2
    assert talk.pins()


def test_each_broadcast_is_sent_once():
    talk = Talk()
    talk.answer(0, 1.0)
    talk.request(BroadcastHead(MAIN), BroadcastHead(MAIN))
    assert talk.broadcasts == [[1, 2]]
    talk.request(BroadcastHead(MAIN))
    assert talk.broadcasts == [[1, 2]]
    talk.answer(0, 1.0)
    talk.request(BroadcastHead(MAIN))
    assert talk.broadcasts == [[1, 2], [1, 2]]
    assert talk.tasks[1].versions == (0, 1, 2)


def test_one_who_is_not_at_work_is_not_told():
    talk = Talk()
    talk.hear(Failed(talk.tasks[2].id, "lost"))
    talk.answer(0, 1.0)
    talk.request(BroadcastHead(MAIN))
    assert talk.broadcasts == [[1]]


def test_a_task_that_is_lost_lets_all_versions_go():
    talk = Talk()
    for _ in range(3):
        talk.answer(0, 1.0)
        talk.request(BroadcastHead(MAIN))
    assert talk.tasks[1].versions == (0, 1, 2, 3)
    for device in (1, 2):
        talk.hear(Failed(talk.tasks[device].id, "lost"))
    assert talk.server.store.versions == (3,)
    assert talk.pins()


def test_only_what_was_sent_can_be_chosen():
    talk = Talk()
    talk.answer(0, 1.0)
    talk.request(BroadcastHead(MAIN))
    assert "0 to 1" in talk.answer(1, 1.0, choice=2)["reason"]
    assert talk.pins()


class Offering:
    """Dispatch: every lineage is offered."""

    def __call__(self, view):
        for device in list(view.idle):
            others = tuple(n for n in view.store.lineages if n != view.lineage_of(device))
            yield Assignment(device, view.lineage_of(device), offers=others)


def test_offers_and_broadcasts_are_numbered_in_the_order_they_were_sent():
    talk = Talk(2, Offering())
    talk.request(Split(MAIN, "child", (1,)))
    talk.answer(0, 1.0)  # version 1 of the main lineage
    talk.answer(1, 1.0)  # was sent the main one: version 2
    task = talk.tasks[1]
    assert (task.lineage, [o.lineage for o in task.offers]) == (MAIN, ["child"])
    talk.answer(0, 1.0)  # version 3
    talk.request(BroadcastHead(MAIN))
    assert task.versions == (2, 0, 3)
    assert task.chosen(0).version == 2
    assert (task.chosen(1).lineage, task.chosen(1).version) == ("child", 0)
    assert (task.chosen(2).lineage, task.chosen(2).version) == (MAIN, 3)
    assert task.chosen(2).versions == (3,)
    assert talk.answer(1, 1.0, choice=1)["lineage"] == "child"
    assert talk.server.lineage_of(1) == "child"
    assert talk.pins()


def test_broadcasts_survive_a_checkpoint():
    talk = Talk()
    talk.answer(0, 1.0)
    talk.request(BroadcastHead(MAIN))
    tree, tensors = encode(talk.server.state())
    twin = Talk(0)
    twin.server.restore(decode(json.loads(json.dumps(tree)), storable(tensors)))
    task = twin.server.open_tasks[talk.tasks[1].id]
    assert task.versions == (0, 1)
    assert torch.equal(task.broadcasts[0].params, talk.tasks[1].broadcasts[0].params)
    one = talk.answer(1, 1.0, choice=1)
    two = twin.answer(1, 1.0, choice=1, task=task)
    assert one == two
    assert torch.equal(twin.server.store.head_params(), talk.server.store.head_params())

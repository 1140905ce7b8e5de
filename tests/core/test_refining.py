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
        self.requests, self.called = [], []

    def act(self, view):
        while self.requests:
            yield self.requests.pop(0)

    def on_fork(self, parent, child):
        self.called.append(("fork", parent, child))

    def on_absorb(self, into, gone):
        self.called.append(("absorb", into, gone))


def full(value):
    return torch.full((SIZE,), float(value))


class Devices:
    def __init__(self, devices=3, dispatch=None):
        parts = {"merge": Scripted(), "weigh": lambda contribution, view: 0.5}
        if dispatch:
            parts["dispatch"] = dispatch
        self.server = Server(full(0), Strategy(**parts), TrainSpec(), seed=1)
        self.script = self.server.strategy.merge
        self.tasks, self.notes, self.broadcasts = {}, [], []
        self.handle(*(Joined(device) for device in range(devices)))

    def handle(self, *events):
        for command in self.server.handle(*events):
            if isinstance(command, Send):
                self.tasks[command.task.device] = command.task
            elif isinstance(command, Broadcast):
                self.broadcasts.append([task.device for task in command.tasks])
            elif isinstance(command, Outcome):
                self.notes.append((command.kind, command.fields))

    def request(self, *requests):
        self.script.requests += requests
        self.handle(Left(99))

    def answer(self, device, value, choice=0, task=None):
        task = task or self.tasks[device]
        update = Update(task.id, torch.full_like(task.params, value), 5, choice=choice)
        self.handle(Arrived(device, update))
        return next(f for kind, f in reversed(self.notes) if kind in ("arrival", "refusal"))

    def lines(self, kind):
        return [fields for k, fields in self.notes if k == kind]

    def pins(self):
        sent = [v for task in self.server.open_tasks.values() for v in task.versions]
        store = self.server.store
        return all(store.pins(v) == sent.count(v) for v in store.versions)


def test_a_split_takes_its_devices_along():
    fleet = Devices()
    fleet.request(Split(MAIN, "child", (1, 2)))
    assert [fleet.server.lineage_of(device) for device in range(3)] == [MAIN, "child", "child"]
    assert fleet.server.clusters() == {MAIN: [0], "child": [1, 2]}
    assert fleet.script.called == [("fork", MAIN, "child")]
    assert fleet.lines("split") == [{"lineage": MAIN, "into": "child", "devices": [1, 2]}]
    # What was sent before the split is of the parent, and is routed there.
    assert fleet.answer(1, 1.0)["lineage"] == MAIN


def test_an_absorption_is_a_commit_and_moves_all_its_devices():
    fleet = Devices()
    fleet.request(Split(MAIN, "child", (1, 2)))
    fleet.request(Absorb(MAIN, "child", full(5)))
    store = fleet.server.store
    assert torch.equal(store.head_params(), full(5))
    assert store.lineages == (MAIN,)
    assert fleet.server.clusters() == {MAIN: [0, 1, 2]}
    assert fleet.lines("commit") == [{"lineage": MAIN, "version": 1, "updates": 0}]
    assert fleet.lines("merge") == [{"lineage": "child", "into": MAIN}]
    assert fleet.script.called[-1] == ("absorb", MAIN, "child")


def on_child():
    """Device 1 works on version 1 as the child's; the main one stands there, too."""
    fleet = Devices()
    fleet.answer(0, 1.0)
    fleet.request(Split(MAIN, "child", (1,)))
    late = fleet.tasks[1]
    fleet.handle(Failed(late.id, "lost"), Joined(1))
    return fleet


def test_a_broadcast_reaches_those_whose_lineage_was_absorbed():
    fleet = on_child()
    task = fleet.tasks[1]
    assert task.lineage == "child"
    fleet.request(Absorb(MAIN, "child", full(5)), BroadcastHead(MAIN))
    assert [sorted(devices) for devices in fleet.broadcasts] == [[0, 1, 2]]
    version = fleet.server.store.head()
    assert task.broadcasts[-1].version == version
    assert task.broadcasts[-1].lineage == MAIN
    line = fleet.answer(1, 1.0, choice=1)
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, version, 0)
    # Half-way from 5 to 6.
    assert torch.equal(fleet.server.store.head_params(), full(5.5))
    assert fleet.pins()


def test_without_the_newer_model_its_staleness_is_counted_where_it_goes():
    fleet = on_child()
    task = fleet.tasks[1]
    fleet.request(Absorb(MAIN, "child", full(5)), BroadcastHead(MAIN))
    fleet.answer(2, 1.0)
    since = fleet.server.store.staleness(task.version, MAIN)
    line = fleet.answer(1, 1.0, choice=0)
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, task.version, since)
    assert since == 2
    assert fleet.pins()


def test_each_broadcast_is_sent_once():
    fleet = Devices()
    fleet.answer(0, 1.0)
    fleet.request(BroadcastHead(MAIN), BroadcastHead(MAIN))
    assert fleet.broadcasts == [[1, 2]]
    fleet.request(BroadcastHead(MAIN))
    assert fleet.broadcasts == [[1, 2]]
    fleet.answer(0, 1.0)
    fleet.request(BroadcastHead(MAIN))
    assert fleet.broadcasts == [[1, 2], [1, 2]]
    assert fleet.tasks[1].versions == (0, 1, 2)


def test_one_who_is_not_at_work_is_not_told():
    fleet = Devices()
    fleet.handle(Failed(fleet.tasks[2].id, "lost"))
    fleet.answer(0, 1.0)
    fleet.request(BroadcastHead(MAIN))
    assert fleet.broadcasts == [[1]]


def test_a_task_that_is_lost_lets_all_versions_go():
    fleet = Devices()
    for _ in range(3):
        fleet.answer(0, 1.0)
        fleet.request(BroadcastHead(MAIN))
    assert fleet.tasks[1].versions == (0, 1, 2, 3)
    for device in (1, 2):
        fleet.handle(Failed(fleet.tasks[device].id, "lost"))
    assert fleet.server.store.versions == (3,)
    assert fleet.pins()


def test_only_what_was_sent_can_be_chosen():
    fleet = Devices()
    fleet.answer(0, 1.0)
    fleet.request(BroadcastHead(MAIN))
    assert "0 to 1" in fleet.answer(1, 1.0, choice=2)["reason"]
    assert fleet.pins()


class Offering:
    """Dispatch: every lineage is offered."""

    def __call__(self, view):
        for device in list(view.idle):
            others = tuple(n for n in view.store.lineages if n != view.lineage_of(device))
            yield Assignment(device, view.lineage_of(device), offers=others)


def test_offers_and_broadcasts_are_numbered_in_the_order_they_were_sent():
    fleet = Devices(2, Offering())
    fleet.request(Split(MAIN, "child", (1,)))
    fleet.answer(0, 1.0)  # version 1 of the main lineage
    fleet.answer(1, 1.0)  # was sent the main one: version 2
    task = fleet.tasks[1]
    assert (task.lineage, [o.lineage for o in task.offers]) == (MAIN, ["child"])
    fleet.answer(0, 1.0)  # version 3
    fleet.request(BroadcastHead(MAIN))
    assert task.versions == (2, 0, 3)
    assert task.chosen(0).version == 2
    assert (task.chosen(1).lineage, task.chosen(1).version) == ("child", 0)
    assert (task.chosen(2).lineage, task.chosen(2).version) == (MAIN, 3)
    assert task.chosen(2).versions == (3,)
    assert fleet.answer(1, 1.0, choice=1)["lineage"] == "child"
    assert fleet.server.lineage_of(1) == "child"
    assert fleet.pins()


def test_broadcasts_survive_a_checkpoint():
    fleet = Devices()
    fleet.answer(0, 1.0)
    fleet.request(BroadcastHead(MAIN))
    tree, tensors = encode(fleet.server.state())
    twin = Devices(0)
    twin.server.restore(decode(json.loads(json.dumps(tree)), storable(tensors)))
    task = twin.server.open_tasks[fleet.tasks[1].id]
    assert task.versions == (0, 1)
    assert torch.equal(task.broadcasts[0].params, fleet.tasks[1].broadcasts[0].params)
    one = fleet.answer(1, 1.0, choice=1)
    two = twin.answer(1, 1.0, choice=1, task=task)
    assert one == two
    assert torch.equal(twin.server.store.head_params(), fleet.server.store.head_params())

"""Quarantine of devices that are refused repeatedly, and roll-back of the model, by hand."""

import json

import pytest
import torch

from latecomer.core.checks import Checks
from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import (
    Arrived,
    Contribution,
    Joined,
    Later,
    Left,
    Ready,
    Send,
    TrainSpec,
    Update,
)
from latecomer.core.outcomes import Dropped, Outcome
from latecomer.core.server import VOID, Server
from latecomer.core.strategy import Compensated, Mix, Split, Stateful, Strategy

SIZE = 4
HUGE = 1e6


class Fleet:
    """A server whose devices answer when they are asked to, with a delta of equal values."""

    def __init__(self, devices=6, strategy=None, initial=None, **options):
        strategy = strategy or Strategy(weigh=lambda c, view: 0.5)
        initial = torch.zeros(SIZE) if initial is None else initial
        self.server = Server(initial, strategy, TrainSpec(), **options)
        self.tasks, self.log = {}, []
        self.handle(*(Joined(device) for device in range(devices)))

    def handle(self, *events):
        commands = self.server.handle(*events)
        self.tasks |= {c.task.device: c.task for c in commands if isinstance(c, Send)}
        self.log += [c for c in commands if isinstance(c, Outcome)]
        return commands

    def answer(self, device, value=1.0):
        task = self.tasks.pop(device)
        delta = torch.full((SIZE,), float(value))
        return self.handle(Arrived(device, Update(task.id, delta, 10)))

    def accept(self, updates, *devices):
        """As many updates of these devices in turn, small enough to be accepted."""
        for number in range(updates):
            self.answer(devices[number % len(devices)], 0.01)

    def found(self, kind):
        return [line.fields for line in self.log if line.kind == kind]

    @property
    def stopped(self):
        return self.server.stopped

    @property
    def head(self):
        return self.server.store.head_params().tolist()


def test_a_third_refusal_is_a_quarantine_of_twenty_updates_and_a_fourth_of_forty():
    fleet = Fleet()
    for device in range(1, 6):
        fleet.answer(device)
    for _ in range(3):
        assert 0 in fleet.tasks
        fleet.answer(0, HUGE)
    (line,) = fleet.found("quarantine")
    assert (line["device"], line["until"]) == (0, 5 + 20)
    fleet.accept(19, 1, 2, 3)
    assert 0 not in fleet.tasks
    fleet.accept(1, 1)
    assert 0 in fleet.tasks
    fleet.answer(0, HUGE)
    assert [each["until"] for each in fleet.found("quarantine")] == [25, 25 + 40]
    fleet.accept(40, 1, 2)
    fleet.answer(0, 0.01)
    assert 0 in fleet.tasks  # accepted again
    assert not fleet.found("rollback")


def test_a_device_in_quarantine_may_leave_and_join():
    fleet = Fleet()
    for device in range(1, 6):
        fleet.answer(device)
    for _ in range(3):
        fleet.answer(0, HUGE)
    fleet.handle(Left(0))
    fleet.accept(20, 1, 2)
    assert 0 not in fleet.tasks
    fleet.handle(Joined(0))
    assert 0 in fleet.tasks
    fleet.answer(0, HUGE)
    fleet.handle(Left(0))
    fleet.handle(Joined(0))
    assert 0 not in fleet.tasks
    assert 0 not in fleet.server.idle


def test_a_large_fleet_has_a_longer_quarantine():
    fleet = Fleet(devices=30)
    for device in range(1, 6):
        fleet.answer(device)
    for _ in range(3):
        fleet.answer(0, HUGE)
    assert fleet.found("quarantine")[0]["until"] == 5 + 30


def test_a_first_hostile_update_is_rolled_back_when_the_median_is_known():
    fleet = Fleet()
    fleet.answer(0, 20.0)  # the largest that a model of zeros lets pass, 20 x sqrt(4)
    poisoned = fleet.tasks[0]
    for device in range(1, 5):
        assert fleet.head[0] > 1.0
        fleet.answer(device, 0.5)
    (line,) = fleet.found("rollback")
    assert (line["version"], line["to"]) == (6, 0)
    assert "devices 0," in line["reason"]
    assert fleet.head == [0.0] * SIZE
    assert [each["device"] for each in fleet.found("quarantine")] == [0]
    fleet.tasks[0] = poisoned
    fleet.answer(0, 0.1)
    fleet.answer(5, 0.1)  # its task is from before the roll-back too
    assert [line["reason"] for line in fleet.found("refusal")] == [VOID, VOID]
    assert fleet.head == [0.0] * SIZE
    assert 5 in fleet.tasks
    assert 0 not in fleet.tasks
    fleet.answer(5, 0.5)
    assert fleet.head == [0.25] * SIZE
    assert not fleet.stopped


def trouble(fleet, devices=4):
    """The last updates of these devices are refused."""
    before = len(fleet.found("rollback"))
    for device in range(devices):
        if len(fleet.found("rollback")) == before:
            fleet.answer(device, HUGE)
    assert len(fleet.found("rollback")) == before + 1


def fresh(fleet):
    """Tasks from before a roll-back are answered and refused."""
    for device in list(fleet.tasks):
        if fleet.tasks[device].params.norm() != fleet.server.store.head_params().norm():
            fleet.answer(device, 0.01)


def test_if_most_are_refused_the_model_goes_back_to_older_and_older_versions():
    fleet = Fleet()
    fleet.accept(60, *range(6))  # a snapshot at the 50th
    fleet.accept(60, *range(6))  # and at the 100th
    trouble(fleet)
    assert [line["to"] for line in fleet.found("rollback")] == [100]
    assert fleet.found("quarantine") == []
    fresh(fleet)
    trouble(fleet)
    fresh(fleet)
    trouble(fleet)
    assert [line["to"] for line in fleet.found("rollback")] == [100, 50, 0]
    assert fleet.head == [0.0] * SIZE
    assert not fleet.stopped
    fresh(fleet)
    trouble(fleet)
    assert "last updates of 4 of 6" not in fleet.stopped  # the checks have started anew
    assert "devices were refused: norm" in fleet.stopped
    assert fleet.stopped.endswith("the model was rolled back to version 0")


def test_roll_backs_in_a_row_are_counted_from_the_last_snapshot():
    fleet = Fleet()
    for _ in range(6):
        fleet.accept(60, *range(6))
        trouble(fleet)
        fresh(fleet)
    assert not fleet.stopped


def test_a_fleet_that_is_in_quarantine_as_a_whole_starts_anew():
    """Some by probation, the others by strikes; otherwise no device would ever get a task."""
    fleet = Fleet(checks=Checks(norm_ratio=0.5))
    for device in range(6):
        fleet.answer(device, 0.1)
    assert fleet.found("rollback")
    for _ in range(200):
        if not fleet.tasks or fleet.stopped:
            break
        fleet.answer(next(iter(fleet.tasks)), 0.1)
    assert fleet.stopped


def test_no_snapshot_is_taken_while_a_fifth_of_the_devices_is_refused():
    fleet = Fleet()
    fleet.accept(45, *range(6))
    fleet.answer(0, HUGE)
    fleet.answer(1, HUGE)
    fleet.accept(40, *range(2, 6))
    trouble(fleet, 5)
    assert fleet.found("rollback")[0]["to"] == 0


def test_one_hostile_device_does_not_prevent_snapshots():
    fleet = Fleet()
    fleet.accept(45, *range(6))
    fleet.answer(0, HUGE)
    fleet.accept(40, *range(1, 6))
    trouble(fleet, 5)
    assert fleet.found("rollback")[0]["to"] == 50


def test_a_hostile_device_that_is_alone_at_first_is_found_when_others_trained_on_its_model():
    """Their updates are as large as its own, and the median does not show it."""
    fleet = Fleet(1, initial=torch.ones(SIZE))
    fleet.answer(0, -15.0)
    fleet.handle(*(Joined(device) for device in range(1, 6)))
    for device in range(1, 5):
        assert fleet.head[0] < -2.0
        fleet.answer(device, 1.0)
    (line,) = fleet.found("rollback")
    assert (line["to"], line["reason"]) == (
        0,
        "first updates, of devices 0, exceed the norm of the model",
    )
    assert fleet.head == [1.0] * SIZE
    assert [each["device"] for each in fleet.found("quarantine")] == [0]


def test_the_run_may_end_with_the_first_roll_back():
    fleet = Fleet(checks=Checks(stop=True))
    fleet.accept(60, *range(6))
    trouble(fleet)
    assert fleet.stopped.endswith("the model was rolled back to version 50")


class OwnModel(Mix):
    keeps_model = True


def test_a_merge_that_keeps_the_model_itself_is_stopped():
    fleet = Fleet(strategy=Strategy(merge=OwnModel()))
    fleet.accept(12, *range(6))
    for device in range(4):
        fleet.answer(device, HUGE)
    assert "of 6 devices were refused" in fleet.stopped
    assert not fleet.found("rollback")


class Remembers(Mix, Stateful):
    """Counts its contributions; the third opens another lineage for devices 4 and 5."""

    kept = ("count",)

    def __init__(self):
        self.count = 0

    def add(self, contribution, view):
        self.count += 1
        return super().add(contribution, view)

    def act(self, view):
        return [Split("main", "other", (4, 5))] if self.count == 3 else []


def test_a_roll_back_closes_lineages_and_starts_the_strategy_anew():
    fleet = Fleet(strategy=Strategy(merge=Remembers()))
    for device in (0, 1, 2):
        fleet.answer(device, 0.1)
    assert fleet.server.lineage_of(5) == "other"
    fleet.answer(5, 0.1)
    fleet.answer(4, 19.0)
    assert fleet.found("rollback")
    assert fleet.server.store.lineages == ("main",)
    assert fleet.server.lineage_of(5) == "main"
    assert fleet.server.strategy.merge.count == 0
    fresh(fleet)
    for device in (0, 1, 2):  # the name is free again
        fleet.answer(device, 0.1)
    assert fleet.server.lineage_of(5) == "other"


class Slow:
    """Compensation that takes a second."""

    def __call__(self, contribution, view):
        return Later(1.0, Ready(contribution))

    def finish(self, contribution: Contribution, view):
        return Compensated(contribution)


def test_a_compensation_from_before_the_roll_back_is_dropped():
    fleet = Fleet(strategy=Strategy(compensate=Slow()))
    waiting = [c.event for c in fleet.answer(0, 19.0) if isinstance(c, Later)]
    for device in range(1, 5):
        fleet.answer(device, 0.1)
    assert fleet.found("rollback")
    (dropped,) = [c for c in fleet.handle(*waiting) if isinstance(c, Dropped)]
    assert dropped.reason == VOID
    assert fleet.head == [0.0] * SIZE


def test_quarantine_snapshots_and_void_tasks_are_in_the_checkpoint():
    fleet = Fleet()
    fleet.accept(60, *range(6))
    trouble(fleet)
    fleet.accept(1, 5)
    twin = Fleet(0)
    tree, tensors = encode(fleet.server.state())
    twin.server.restore(decode(json.loads(json.dumps(tree)), storable(tensors)))
    twin.tasks = dict(fleet.tasks)
    for each in (fleet, twin):
        each.log.clear()
        fresh(each)
        for device in range(5):
            each.answer(device, 0.1)
        for _ in range(3):
            each.answer(0, HUGE)
        each.accept(25, 1, 2)
        trouble(each)
    assert [line.fields for line in fleet.log] == [line.fields for line in twin.log]
    assert fleet.found("quarantine")
    assert fleet.head == twin.head


@pytest.mark.parametrize("devices", [1, 2, 3, 10])
def test_honest_devices_are_never_refused(devices):
    fleet = Fleet(devices)
    for turn in range(200):
        fleet.answer(turn % devices, 1.0 / (1 + turn))
    assert {line.kind for line in fleet.log} == {"dispatch", "arrival", "commit"}
    assert fleet.server.store.commits == 200

"""When a new model is broadcast to working devices: each policy by hand."""

import json
from copy import deepcopy

import pytest
import torch

from commands import logged, sends
from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Broadcast,
    Joined,
    TimerExpired,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.core.store import ModelStore
from latecomer.core.strategy import BroadcastHead, Commit, Observer, Strategy
from latecomer.strategies.parts import broadcasts as broadcasting
from latecomer.strategies.parts.broadcast_predictor import Predictor, broadcast_features
from latecomer.strategies.parts.broadcasts import MAX_CHANGES, Broadcasting, merged_changes
from toy import SIZE, ToyRun, toy_fleet, toy_server


class Line:
    """A lineage whose model is one number, beginning with 0."""

    def __init__(self, policy, every=5):
        self.part = Broadcasting(policy, every)
        self.store = ModelStore(torch.zeros(1))

    def to(self, model, lineage=MAIN):
        """Commit `model`; the lineages that are broadcast."""
        self.commit(model, lineage)
        return self.broadcasts()

    def commit(self, model, lineage=MAIN):
        commit = Commit(lineage, torch.tensor([model]), 1)
        self.part.on_commit(commit, self)
        self.store.commit(commit.lineage, commit.params)

    def broadcasts(self):
        return [action.lineage for action in self.part.act(self)]

    def through(self, *models):
        return [bool(self.to(model)) for model in models]

    def record(self, lineage=MAIN):
        return self.part._records[lineage]


def test_never_and_always():
    assert Line("never").through(1.0, 2.0, 3.0) == [False] * 3
    assert Line("always").through(1.0, 2.0, 3.0) == [True] * 3


def test_every_nth_merge():
    assert Line("every-n", 3).through(*map(float, range(1, 8))) == [False, False, True] * 2 + [
        False
    ]


def test_lineages_are_counted_apart():
    line = Line("every-n", 2)
    line.store.fork(MAIN, "other")
    assert line.to(1.0) == []
    assert line.to(1.0, "other") == []
    assert line.to(2.0, "other") == ["other"]
    assert line.to(2.0) == [MAIN]


def test_the_oracle_is_eq_4_one_merge_late():
    """Gathered since the last broadcast, and the change that followed."""
    line = Line("oracle")
    broadcast = line.through(
        1.0,  # nothing had accumulated
        1.5,  # 1 had accumulated, then 0.5: it would have paid; 1.5 is broadcast
        3.0,  # nothing had accumulated
        3.2,  # 1.5, then 0.2
        3.3,  # nothing
        3.5,  # 0.1, then 0.2: it would not have paid
        3.8,  # 0.3, then 0.3: just so
    )
    assert broadcast == [False, True, False, True, False, False, True]


def test_the_oracle_is_silent_while_nothing_changes():
    assert Line("oracle").through(0.0, 0.0, 0.0) == [False] * 3


class Fake:
    """A predictor with a given answer, which keeps what it was trained on."""

    says = 0.0

    def __init__(self, weights=None):
        self.lessons, self.seen = [], []

    def probability(self, state):
        self.seen.append(state)
        return self.says

    def train(self, features, labels):
        self.lessons.append((list(features), list(labels)))

    weights = {}  # noqa: RUF012


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(broadcasting, "Predictor", Fake)
    yield Fake
    Fake.says = 0.0


def test_the_predictor_decides(fake):
    fake.says = 0.51
    assert Line("predictor").through(1.0, 2.0) == [True, True]
    fake.says = 0.5
    assert Line("predictor").through(1.0, 2.0) == [False, False]


def test_the_predictor_sees_the_last_changes_and_what_has_gathered(fake):
    line = Line("predictor")
    line.through(1.0, 3.0, 2.5)
    expected = broadcast_features([1.0, 2.0, 0.5], 2.5, MAX_CHANGES)
    assert torch.equal(line.record().predictor.seen[-1], expected)
    line.through(*(float(i) for i in range(20)))
    assert len(line.record().changes) == MAX_CHANGES


def test_after_a_broadcast_nothing_has_gathered(fake):
    fake.says = 1.0
    line = Line("predictor")
    line.through(1.0, 3.0)
    assert torch.equal(
        line.record().predictor.seen[-1], broadcast_features([1.0, 2.0], 2.0, MAX_CHANGES)
    )


# Each step of 1 follows a step of 1: what has accumulated at a prediction is never less than what
# follows, and every broadcast pays. Steps that grow pay only if more than one has accumulated.
@pytest.mark.parametrize("says", [0.0, 1.0])
@pytest.mark.parametrize(
    ("step", "labels"),
    [
        (lambda t: float(t), {0.0: [1] * 10, 1.0: [1] * 10}),
        (lambda t: 3.0**t, {0.0: [0] * 10, 1.0: [0] * 10}),
        (lambda t: t * (t + 1) / 2, {0.0: [0] + [1] * 9, 1.0: [0] * 10}),
    ],
    ids=["even", "tripling", "growing"],
)
def test_the_label_is_eq_4_for_the_moment_of_the_prediction(fake, says, step, labels):
    fake.says = says
    line = Line("predictor")
    start = step(0)
    line.store.commit(MAIN, torch.tensor([start]))
    for t in range(1, 12):
        line.to(step(t))
    ((features, found),) = line.record().predictor.lessons
    assert found == labels[says]
    assert len(features) == MAX_CHANGES


def test_ten_labels_make_a_training_step_and_are_then_dropped(fake):
    line = Line("predictor")
    line.through(*map(float, range(1, 33)))
    lessons = line.record().predictor.lessons
    assert [len(labels) for _, labels in lessons] == [10, 10, 10]
    assert len(line.record().features) == 2
    # Every input has its own label, in order.
    assert torch.equal(lessons[1][0][0], line.record().predictor.seen[10])


def test_it_goes_on_learning():
    line = Line("predictor")
    before = Predictor().weights["out.bias"].clone()
    line.through(*(1.1**t for t in range(12)))
    assert not torch.equal(line.record().predictor.weights["out.bias"], before)


# Lineages come and go


def with_lessons(policy="predictor"):
    """A line whose predictor is no longer that of the package."""
    line = Line(policy)
    line.through(*(1.1**t for t in range(12)))
    return line


def test_on_a_split_the_weights_are_inherited_the_records_are_not_and_nothing_is_broadcast():
    line = with_lessons()
    line.store.fork(MAIN, "child")
    line.part.on_fork(MAIN, "child")
    assert line.broadcasts() == []
    child, parent = line.record("child"), line.record()
    assert (child.changes, child.features, child.labels, child.last_broadcast) == ([], [], [], None)
    inherited, own = (deepcopy(each.predictor.weights) for each in (child, parent))
    assert all(torch.equal(inherited[name], value) for name, value in own.items())
    assert len(parent.changes) == MAX_CHANGES
    # Each learns for itself from now on.
    child.predictor.train([broadcast_features([1.0], 1.0, MAX_CHANGES)], [0])
    assert all(torch.equal(line.record().predictor.weights[n], v) for n, v in own.items())


def test_a_child_gathers_from_the_fork_on():
    line = Line("oracle")
    line.to(10.0)
    line.store.fork(MAIN, "child")
    line.part.on_fork(MAIN, "child")
    assert line.to(11.0, "child") == []  # nothing had accumulated
    assert line.to(11.5, "child") == ["child"]  # 1 had, then 0.5


def test_on_a_merge_records_are_sampled_predictors_averaged_and_the_model_broadcast():
    line = with_lessons()
    line.store.fork(MAIN, "child")
    line.part.on_fork(MAIN, "child")
    for model in (5.0, 9.0, 9.5):
        line.to(model, "child")
    line.broadcasts()
    child, parent = line.record("child"), line.record()
    child.predictor = Predictor({n: v + 2 for n, v in parent.predictor.weights.items()})
    expected = merged_changes(parent.changes, child.changes)
    own = deepcopy(parent.predictor.weights)
    line.store.absorb(MAIN, "child")
    line.part.on_absorb(MAIN, "child")
    assert line.broadcasts() == [MAIN]
    merged = line.record()
    assert merged.changes == expected
    assert all(
        torch.allclose(value, own[name] + 1) for name, value in merged.predictor.weights.items()
    )
    assert (merged.features, merged.labels) == ([], [])
    assert torch.equal(merged.last_broadcast, line.store.head_params())
    assert "child" not in line.part._records
    assert line.broadcasts() == []


def test_with_never_a_merge_is_not_broadcast_either():
    line = Line("never")
    line.store.fork(MAIN, "child")
    line.store.absorb(MAIN, "child")
    line.part.on_absorb(MAIN, "child")
    assert line.broadcasts() == []


def test_a_lineage_that_is_gone_is_not_broadcast():
    line = Line("always")
    line.store.fork(MAIN, "child")
    line.commit(3.0, "child")
    line.store.absorb(MAIN, "child")
    line.part.on_absorb(MAIN, "child")
    assert line.broadcasts() == [MAIN]


def test_records_are_sampled_in_proportion_to_their_variance():
    """Variances 1 and 9: one of ten from the first, the largest; nine of which there are two."""
    assert merged_changes([1.0, 3.0], [0.0, 6.0]) == [3.0, 6.0, 0.0]
    # Variances 3 and 7 in units of the first: three and seven of ten.
    one, other = [0.0, 2.0] * 5, [0.0, 2 * (7 / 3) ** 0.5] * 5
    found = merged_changes(one, other)
    assert len(found) == MAX_CHANGES
    assert sum(value in (0.0, 2.0) for value in found[:3]) == 3
    assert found[3:].count(other[1]) == 5
    assert merged_changes([4.0, 4.0], [2.0]) == [4.0, 4.0, 2.0]  # no variance at all: half of each
    assert merged_changes([], []) == []


# Checkpoints


def test_its_state_survives_a_file():
    line = with_lessons()
    line.part.on_absorb(MAIN, "gone")
    line.commit(9.0)
    tree, tensors = encode(line.part.state())
    state = decode(json.loads(json.dumps(tree, allow_nan=False)), storable(tensors))
    assert state["records"].keys() == {MAIN}
    twin = Line("predictor")
    twin.part.restore(state)
    twin.store = line.store
    assert twin.broadcasts() == line.broadcasts() == [MAIN]
    one, two = line.record(), twin.record()
    assert torch.equal(one.last_broadcast, two.last_broadcast)
    assert (one.changes, one.labels, one.merges, one.accumulated) == (
        two.changes,
        two.labels,
        two.merges,
        two.accumulated,
    )
    assert all(torch.equal(a, b) for a, b in zip(one.features, two.features, strict=True))
    again = two.predictor.weights
    assert all(torch.equal(again[n], v) for n, v in one.predictor.weights.items())


# In the server


def test_working_devices_get_the_broadcast_and_the_bytes_are_counted():
    server = toy_server("echopfl", {"clusters": 1, "max_ratio": 1.0, "broadcast": "always"})
    tasks = sends(server.handle(*(Joined(device) for device in range(3))))
    commands = server.handle(Arrived(1, Update(tasks[1].id, torch.ones(SIZE), 5)))
    (broadcast,) = [c for c in commands if isinstance(c, Broadcast)]
    assert [task.device for task in broadcast.tasks] == [0, 2]
    assert [task.versions for task in broadcast.tasks] == [(0, 1), (0, 1)]
    (line,) = logged(commands, "broadcast")
    assert line == {"lineage": MAIN, "version": 1, "devices": 2, "bytes": 2 * 4 * SIZE}
    # Device 1 itself is sent the new model with its next task.
    assert [task.version for task in sends(commands)] == [1]
    assert server.store.pins(1) == 3


def test_devices_of_other_clusters_get_no_broadcast():
    server = toy_server("echopfl", {"broadcast": "always"})
    tasks = sends(server.handle(*(Joined(device) for device in range(4))))
    for device, at in ((0, 0.0), (1, 8.0), (2, 8.0)):
        update = Update(tasks[device].id, torch.full((SIZE,), at), 5)
        commands = server.handle(Arrived(device, update))
    # Devices 1 and 2 are in cluster-1; device 0 and the one without an update are not.
    (broadcast,) = [c for c in commands if isinstance(c, Broadcast)]
    assert [task.device for task in broadcast.tasks] == [1]


class BroadcastsAtOnce(Observer):
    broadcasts = True

    """Asks for a broadcast of the main head after every moment."""

    def act(self, view):
        return [BroadcastHead(MAIN)]


def test_devices_that_have_the_head_get_no_broadcast():
    server = Server(torch.zeros(SIZE), Strategy(observers=(BroadcastsAtOnce(),)), TrainSpec())
    tasks = sends(server.handle(Joined(0), Joined(1)))
    commands = server.handle(TimerExpired("none", 0))
    assert not [c for c in commands if isinstance(c, Broadcast)]
    commands = server.handle(Arrived(0, Update(tasks[0].id, torch.ones(SIZE), 5)))
    (broadcast,) = [c for c in commands if isinstance(c, Broadcast)]
    assert [task.device for task in broadcast.tasks] == [1]


@pytest.mark.parametrize("policy", ["never", "always", "every-n", "oracle", "predictor"])
def test_a_run_with_each_policy_can_be_resumed(policy):
    def run():
        return ToyRun(toy_server("echopfl", {"broadcast": policy, "every": 5}), toy_fleet(8))

    whole, first = run(), run()
    whole.until(17)
    whole.until(80)
    first.until(17)
    second = first.carried_over(run())
    second.until(80)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()
    assert bool(whole.lines("broadcast")) is (policy != "never")

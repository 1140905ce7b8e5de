"""The server without an engine: events by hand, commands read back."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.checks import Checks
from latecomer.core.messages import (
    Arrived,
    Broadcast,
    Contribution,
    Failed,
    Joined,
    Later,
    Left,
    Ready,
    Received,
    Task,
    TimerExpired,
    TrainSpec,
    Update,
)
from latecomer.core.outcomes import ClusterSplit
from latecomer.core.params import CHUNK
from latecomer.core.server import Server
from latecomer.core.strategy import (
    Absorb,
    BroadcastHead,
    ImmediateDispatch,
    Observer,
    Split,
    Strategy,
    mixed,
)
from latecomer.core.submodel import Submodel

SIZE = 4


def make_server(strategy=None, **options):
    return Server(torch.zeros(SIZE), strategy or Strategy(), TrainSpec(), **options)


def arrival(task, value=1.0, device=None):
    delta = torch.full((task.params.numel(),), value)
    return Arrived(task.device if device is None else device, Update(task.id, delta, 10))


def test_a_device_that_joins_gets_the_head():
    server = make_server()
    (task,) = sends(server.handle(Joined(7)))
    assert (task.device, task.version, task.number) == (7, 0, 0)
    assert torch.equal(task.params, torch.zeros(SIZE))
    assert server.store.pins(0) == 1


def test_an_update_goes_the_straight_line_and_the_device_gets_the_new_head():
    server = make_server(Strategy(weigh=lambda c, view: 0.25))
    (task,) = sends(server.handle(Joined(0)))
    commands = server.handle(arrival(task, 2.0))
    assert torch.equal(server.store.head_params(), torch.full((SIZE,), 0.5))
    (again,) = sends(commands)
    assert (again.version, again.number, again.id) == (1, 1, 1)
    (line,) = logged(commands, "arrival")
    assert line["staleness"] == 0
    assert line["weight"] == 0.25
    assert line["bytes"] == 4 * SIZE
    assert server.store.versions == (1,)


def test_staleness_is_counted_by_the_server():
    server = make_server()
    slow, *fast = sends(server.handle(Joined(0), Joined(1)))
    for _ in range(3):
        fast = sends(server.handle(arrival(fast[0])))
    commands = server.handle(arrival(slow))
    assert logged(commands, "arrival")[0]["staleness"] == 3


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t: Arrived(t.device, Update(99, torch.zeros(SIZE), 1)), "unknown"),
        (lambda t: arrival(t, float("nan")), "not finite"),
        (lambda t: Arrived(t.device, Update(t.id, torch.zeros(SIZE + 1), 1)), "values"),
        (lambda t: Arrived(t.device, Update(t.id, torch.zeros(SIZE), 0)), "num_examples"),
        (lambda t: arrival(t, device=55), "belongs to device"),
        (lambda t: Arrived(t.device, Update([t.id], torch.zeros(SIZE), 1)), "unknown"),
    ],
)
def test_a_bad_update_is_refused_and_the_model_untouched(make, reason):
    server = make_server()
    (task,) = sends(server.handle(Joined(3)))
    before = server.store.head_params().clone()
    commands = server.handle(make(task))
    (refusal,) = logged(commands, "refusal")
    assert reason in refusal["reason"]
    assert torch.equal(server.store.head_params(), before)
    assert server.store.commits == 0
    assert server.accepted == 0


def test_a_refused_device_goes_back_to_the_pool():
    server = make_server()
    (task,) = sends(server.handle(Joined(3)))
    (again,) = sends(server.handle(arrival(task, float("inf"))))
    assert again.device == 3
    assert again.number == 1


def test_nobody_can_answer_for_another_device():
    server = make_server()
    mine, _ = sends(server.handle(Joined(0), Joined(1)))
    assert logged(server.handle(arrival(mine, device=1)), "refusal")
    assert not logged(server.handle(arrival(mine)), "refusal")


def test_a_replayed_update_is_refused():
    server = make_server()
    (task,) = sends(server.handle(Joined(0)))
    server.handle(arrival(task))
    head = server.store.head()
    assert logged(server.handle(arrival(task)), "refusal")
    assert server.store.head() == head


def test_a_norm_far_above_the_median_is_refused():
    server = make_server(checks=Checks(norm_ratio=5))
    tasks = sends(server.handle(*(Joined(device) for device in range(5))))
    for task in tasks:
        (task,) = sends(server.handle(arrival(task)))
    assert "norm" in logged(server.handle(arrival(task, 6.0)), "refusal")[0]["reason"]


def test_a_lost_task_frees_its_version_and_the_device_may_come_back():
    server = make_server()
    lost, fast = sends(server.handle(Joined(0), Joined(1)))
    server.handle(arrival(fast))
    assert 0 in server.store.versions
    commands = server.handle(Failed(lost.id, "crashed"))
    assert logged(commands, "drop")[0]["reason"] == "crashed"
    assert 0 not in server.store.versions
    (again,) = sends(server.handle(Joined(0)))
    assert again.number == 1
    assert server.handle(Failed(12345, "never heard of")) == []


def test_a_device_that_left_gets_no_task_but_its_late_update_counts():
    server = make_server()
    (task,) = sends(server.handle(Joined(0)))
    assert sends(server.handle(Left(0))) == []
    assert sends(server.handle(arrival(task), Left(0))) == []
    assert server.accepted == 1
    assert len(sends(server.handle(Joined(0)))) == 1


def test_several_uploads_of_one_device_may_be_under_way():
    server = make_server()
    (first,) = sends(server.handle(Joined(0)))
    (second,) = sends(server.handle(Joined(0)))
    assert len(server.open_tasks) == 2
    commands = server.handle(arrival(first))
    assert sends(commands) == []  # it is still busy with the second
    assert server.accepted == 1
    assert len(sends(server.handle(arrival(second)))) == 1


def test_compensation_that_takes_time_re_enters_at_weigh():
    seen = []

    def compensate(contribution, view):
        fresh = contribution.rebase(view.store.head_params(), contribution.delta * 2)
        return Later(5.0, Ready(fresh)) if contribution.staleness else contribution

    def weigh(contribution, view):
        seen.append(contribution.staleness)
        return 1.0

    server = make_server(Strategy(compensate=compensate, weigh=weigh))
    late, fast = sends(server.handle(Joined(0), Joined(1)))
    server.handle(arrival(fast))
    commands = server.handle(arrival(late))
    (later,) = [c for c in commands if isinstance(c, Later)]
    assert later.seconds == 5.0
    assert len(sends(commands)) == 1  # the device goes on meanwhile
    assert server.store.commits == 1
    server.handle(later.event)
    assert server.store.commits == 2
    assert seen == [0, 0]
    assert torch.equal(server.store.head_params(), torch.full((SIZE,), 3.0))


def test_timers_reach_the_parts_that_wait_for_them():
    class Waiting:
        due = None

        def add(self, contribution, view):
            return None

        def settle(self, view):
            return ()

        def on_timer(self, due, view):
            self.due = due

    server = make_server(Strategy(merge=Waiting()))
    server.handle(TimerExpired("epoch", 3))
    assert server.strategy.merge.due == TimerExpired("epoch", 3)


def test_coordinates_outside_a_sub_model_stay_bit_unchanged():
    server = make_server(Strategy(weigh=lambda c, view: 0.5))
    part = Submodel("half", torch.tensor([0, 2]))
    (task,) = sends(server.handle(Joined(0, part)))
    assert task.params.numel() == 2
    server.handle(arrival(task, 1.0))
    assert server.store.head_params().tolist() == [0.5, 0.0, 0.5, 0.0]


def test_state_round_trip_gives_the_same_future():
    server = make_server(Strategy(weigh=lambda c, view: 0.3))
    slow, fast = sends(server.handle(Joined(0), Joined(1)))
    (fast,) = sends(server.handle(arrival(fast, 0.7)))
    twin = make_server(Strategy(weigh=lambda c, view: 0.3))
    twin.restore(server.state())
    for each in (server, twin):
        each.handle(arrival(fast, -0.2))
        each.handle(arrival(slow, 0.5))
    assert torch.equal(server.store.head_params(), twin.store.head_params())
    assert server.tasks_given == twin.tasks_given


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_dropped_and_the_model_untouched(weight):
    server = make_server(Strategy(weigh=lambda c, view: weight))
    (task,) = sends(server.handle(Joined(0)))
    assert "weight" in logged(server.handle(arrival(task)), "drop")[0]["reason"]
    assert server.store.commits == 0


def test_a_repaired_update_whose_lineage_was_absorbed_goes_to_the_one_that_took_it_in():
    server = make_server(Strategy(compensate=lambda c, view: Later(1.0, Ready(c))))
    (task,) = sends(server.handle(Joined(0)))
    (later,) = [c for c in server.handle(arrival(task)) if isinstance(c, Later)]
    server.store.fork("main", "other")
    server.store.absorb("other", "main")
    server.handle(later.event)
    assert server.store.lineages == ("other",)
    assert server.store.commits == 1


def test_the_sub_model_of_a_device_is_that_of_its_last_task():
    server, part = make_server(), Submodel("half", torch.tensor([0, 2]))
    server.handle(Joined(0), Joined(1, part))
    assert (server.submodel_of(0), server.submodel_of(1), server.submodel_of(7)) == (
        None,
        part,
        None,
    )
    server.handle(Joined(0, part), Joined(1))
    twin = make_server()
    twin.restore(server.state())
    for each in (server, twin):
        assert (each.submodel_of(0), each.submodel_of(1)) == (part, None)


def test_the_log_line_of_a_refused_update():
    server = make_server()
    one, two = sends(server.handle(Joined(0), Joined(1)))
    server.handle(arrival(one))
    bad = Update(two.id, torch.zeros(SIZE + 1), 10, epsilon=0.5)
    (line,) = logged(server.handle(Arrived(1, bad)), "refusal")
    assert {name: line[name] for name in ("device", "task", "sent", "version", "bytes")} == {
        "device": 1,
        "task": two.id,
        "sent": 0,
        "version": 1,
        "bytes": 4 * (SIZE + 1),
    }
    assert line["epsilon"] == 0.5
    unknown = Update("one", None, 10, epsilon=float("inf"))
    (line,) = logged(server.handle(Arrived(1, unknown)), "refusal")
    assert line == {"device": 1, "reason": "the task is unknown or already closed"}


def test_a_device_whose_budget_is_spent_gets_no_more_tasks():
    server = make_server()
    (task,) = sends(server.handle(Joined(0)))
    last = Update(task.id, torch.ones(SIZE), 10, epsilon=2.0, last=True)
    commands = server.handle(Arrived(0, last))
    assert sends(commands) == sends(server.handle(Joined(0))) == []
    (line,) = logged(commands, "retire")
    assert (line["device"], line["epsilon"]) == (0, 2.0)
    assert server.store.commits == server.accepted == 1
    twin = make_server()
    twin.restore(server.state())
    assert sends(twin.handle(Joined(0))) == []


def test_an_answer_without_a_delta_is_accepted_and_changes_nothing():
    server = make_server()
    (task,) = sends(server.handle(Joined(0)))
    commands = server.handle(Arrived(0, Update(task.id, None, 10, epsilon=0.5)))
    (line,) = logged(commands, "arrival")
    assert (line["skipped"], line["saved"], line["epsilon"]) == (True, 4 * SIZE, 0.5)
    assert (server.store.commits, server.accepted) == (0, 1)
    assert [t.number for t in sends(commands)] == [1]


class Broadcasting(Observer):
    """Broadcasts the head after every commit, to the given devices."""

    broadcasts = True

    def __init__(self, devices=None):
        self.devices, self.commits = devices, 0

    def act(self, view):
        if view.store.commits > self.commits:
            self.commits = view.store.commits
            yield BroadcastHead("main", self.devices)


def test_a_broadcast_reaches_devices_with_an_older_model():
    server = make_server(Strategy(observers=(Broadcasting(),)))
    one, two, three = sends(server.handle(*map(Joined, range(3))))
    commands = server.handle(arrival(one))
    (line,) = logged(commands, "broadcast")
    assert (line["devices"], line["bytes"], line["version"]) == (2, 2 * 4 * SIZE, 1)
    (broadcast,) = [c for c in commands if isinstance(c, Broadcast)]
    assert [task.device for task in broadcast.tasks] == [1, 2]
    assert two.versions == three.versions == (0, 1)
    assert server.store.pins(1) == 3  # two broadcasts, and the new task of device 0
    server.handle(Received(((two.id, ()), (three.id, (1,)))))
    assert (two.broadcasts, len(three.versions)) == ((None,), 2)
    assert server.store.pins(1) == 2
    # An update of device 2 is based on the broadcast, and not stale.
    update = Update(three.id, torch.ones(SIZE), 10, choice=1)
    (line,) = logged(server.handle(Arrived(2, update)), "arrival")
    assert (line["sent"], line["staleness"]) == (1, 0)


def test_a_part_that_broadcasts_must_declare_it():
    observer = Broadcasting()
    observer.broadcasts = False
    server = make_server(Strategy(observers=(observer,)))
    one, _ = sends(server.handle(Joined(0), Joined(1)))
    with pytest.raises(ValueError, match="BroadcastHead without"):
        server.handle(arrival(one))


def test_a_broadcast_to_some_devices():
    server = make_server(Strategy(observers=(Broadcasting(frozenset({2})),)))
    one, two, three = sends(server.handle(*map(Joined, range(3))))
    (line,) = logged(server.handle(arrival(one)), "broadcast")
    assert line["devices"] == 1
    assert (two.versions, three.versions) == ((0,), (0, 1))


class Regroup(Observer):
    """Splits device 1 off after the first commit, and merges it back after the second."""

    def act(self, view):
        if view.store.commits == 1 and "other" not in view.store:
            yield Split("main", "other", (1,))
        elif view.store.commits == 2 and "other" in view.store:
            yield Absorb("main", "other", torch.full((SIZE,), 9.0), "alike")


def test_a_cluster_is_split_off_and_merged():
    server = make_server(Strategy(observers=(Regroup(),)))
    one, _ = sends(server.handle(Joined(0), Joined(1)))
    assert server.clusters() == {"main": [0, 1]}
    commands = server.handle(arrival(one))
    assert logged(commands, "split") == [{"lineage": "main", "into": "other", "devices": [1]}]
    assert server.clusters() == {"main": [0], "other": [1]}
    (again,) = sends(commands)
    commands = server.handle(arrival(again))
    assert logged(commands, "merge") == [{"lineage": "other", "into": "main", "reason": "alike"}]
    assert server.clusters() == {"main": [0, 1]}
    assert server.store.head_params().tolist() == [9.0] * SIZE
    assert server.store.commits == 3


def test_concurrency_limits_the_working_devices():
    server = make_server(Strategy(dispatch=ImmediateDispatch(concurrency=2)))
    tasks = sends(server.handle(*map(Joined, range(5))))
    assert len(tasks) == 2
    assert len(sends(server.handle(arrival(tasks[0])))) == 1
    assert (len(server.working), len(server.idle)) == (2, 3)


def test_long_vectors_are_mixed_as_short_ones():
    size = CHUNK + 3
    base, delta, head = (torch.arange(float(size)) * scale for scale in (1e-3, -2e-3, 5e-4))
    task = Task(0, 0, 0, "main", 0, TrainSpec(), base)
    contribution = Contribution(task, Update(0, delta, 1), base, delta, "main", 0)
    found = mixed(head, contribution, 0.25)
    assert torch.equal(found, torch.lerp(head, base + delta, 0.25))


def test_a_route_to_a_new_lineage_is_reported_as_a_split():
    server = Server(torch.zeros(1), Strategy(route=lambda c, view: "other"), TrainSpec())
    (task,) = sends(server.handle(Joined(0)))
    done = server.handle(Arrived(0, Update(task.id, torch.ones(1), 1)))
    assert [each for each in done if isinstance(each, ClusterSplit)] == [
        ClusterSplit("main", "other", [0])
    ]

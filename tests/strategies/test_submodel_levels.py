"""Which width a device gets: levels by hand, no flapping, and strategies that carry them."""

import pytest
import torch

from latecomer.core import strategy as protocols
from latecomer.core.messages import (
    MAIN,
    Contribution,
    Joined,
    Note,
    Send,
    Task,
    TimerExpired,
    TrainSpec,
)
from latecomer.core.messages import Update as Answer
from latecomer.core.server import Server
from latecomer.core.strategy import Assignment, Strategy
from latecomer.core.submodel import Submodel
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.parts.submodel_levels import (
    Around,
    SubmodelFitting,
    declared_levels,
    measured_levels,
)
from latecomer.strategies.recipe import recipes
from toy import SIZE, ToyRun, toy_fleet, toy_server

WIDE, NARROW = Submodel("wide", torch.arange(4)), Submodel("narrow", torch.arange(2))
SUBMODELS = {1.0: None, 0.5: WIDE, 0.25: NARROW}
WORK = {"": 1.0, "wide": 0.25, "narrow": 0.0625}


def fitting(**options):
    return SubmodelFitting(SUBMODELS, WORK, **options)


def done(device, seconds, submodel=None):
    task = Task(0, device, 0, MAIN, 0, TrainSpec(), torch.zeros(2), submodel)
    update = Answer(0, torch.zeros(2), 1)
    return Contribution(task, update, task.params, update.delta, MAIN, 0, seconds=seconds)


def work_for(part, device, whole_seconds, tasks=1):
    """The device does tasks at its level, each as long as that much of the whole model takes."""
    for _ in range(tasks):
        submodel = part.submodel(device)
        part.hear(done(device, whole_seconds * WORK[submodel.name if submodel else ""], submodel))


def settled(**options):
    """Five devices that take 1, 2, 4, 10 and 100 s for the whole model, each heard once."""
    part = fitting(at_least=5, **options)
    for device, seconds in enumerate((1.0, 2.0, 4.0, 10.0, 100.0)):
        part.hear(done(device, seconds))
    part.changes()
    return part


# The first assignment


def test_everybody_carries_the_whole_until_three_are_known():
    part = fitting()
    part.hear(done(0, 1.0))
    part.hear(done(0, 1.0))
    part.hear(done(7, 100.0))
    assert [part.level(device) for device in (0, 7, 3)] == [1.0, 1.0, 1.0]
    assert part.changes() == []
    part.hear(done(3, 4.0))  # the median is 4: 100 * 0.0625 is more, but nothing is narrower
    assert [part.level(device) for device in (0, 7, 3)] == [1.0, 0.25, 1.0]
    assert part.submodel(7) is NARROW
    assert part.submodel(0) is None
    assert part.changes() == [Note("level", {"device": 7, "width": 0.25, "seconds": 100.0})]
    assert part.changes() == []


def test_the_widest_whose_time_is_at_most_the_median():
    part = fitting(at_least=5)
    for device, seconds in enumerate((1.0, 2.0, 4.0, 16.0, 16.1)):
        part.hear(done(device, seconds))
    # The median is 4 s: 16 s is 4 s at a quarter of the work, 16.1 s is more.
    assert [part.level(device) for device in range(5)] == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert [note.fields["device"] for note in part.changes()] == [3, 4]


def test_a_newcomer_is_fitted_after_its_first_task():
    part = settled()
    assert part.level(9) == 1.0
    part.hear(done(9, 11.0))  # the lower median of 1, 2, 4, 10, 11, 100 is 4
    assert part.level(9) == 0.5


def test_slack_allows_for_more():
    tight, loose = settled(), settled(slack=3.0)
    assert tight.level(3) == 0.5
    assert loose.level(3) == 1.0  # 10 <= 3 * 4


def test_slack_below_one_narrows_even_the_median_device():
    part = fitting(slack=0.5)
    for device in range(3):
        part.hear(done(device, 1.0))
    assert {part.level(device) for device in range(3)} == {0.5}


def test_times_that_take_no_time():
    part = fitting()
    for device in range(4):
        part.hear(done(device, 0.0))
    assert {part.level(device) for device in range(4)} == {1.0}


def test_narrowing_the_upper_half_does_not_move_the_yardstick():
    """Tasks with 3 s of fixed costs: the narrow ones say little of the whole model's time."""
    part = fitting(at_least=4)

    def act(device, seconds):
        submodel = part.submodel(device)
        share = WORK[submodel.name if submodel else ""]
        part.hear(done(device, 3.0 + seconds * share, submodel))

    for _ in range(30):
        for device, seconds in enumerate((1.0, 2.0, 5.0, 9.0)):
            act(device, seconds)
    # 3 + 5 / 4 = 4.25 and 3 + 9 / 4 = 5.25, beside 1.2 * 5 s.
    assert [part.level(device) for device in range(4)] == [1.0, 1.0, 0.5, 0.5]


# When it changes for good


def test_three_times_slower_for_good_is_narrower_after_three_tasks_and_not_before():
    part = fitting()
    for device in range(6):
        work_for(part, device, 4.0, 3)
    for tasks in range(1, 3):
        work_for(part, 5, 12.0)
        assert part.level(5) == 1.0, tasks
    work_for(part, 5, 12.0)
    assert part.level(5) == 0.5
    assert part.changes() == [Note("level", {"device": 5, "width": 0.5, "seconds": 12.0})]
    work_for(part, 5, 12.0, 20)
    assert part.changes() == []


def test_up_to_a_fifth_too_slow_is_borne():
    part = settled()
    work_for(part, 2, 12.0, 20)
    # 1, 2, 10, 12, 100: the median is 10 now.
    assert part.level(2) == 1.0
    work_for(part, 2, 12.1, 3)
    assert part.level(2) == 0.5


def test_faster_again_for_good():
    part = fitting()
    for device in range(6):
        work_for(part, device, 12.0 if device == 5 else 4.0, 3)
    assert part.level(5) == 0.5
    work_for(part, 5, 3.5, 20)  # 3.5 * 1.2 > 4
    work_for(part, 5, 3.0, 2)
    assert part.level(5) == 0.5
    work_for(part, 5, 3.0)  # 3 * 1.2 <= 4
    assert part.level(5) == 1.0


def test_one_slow_task_changes_nothing():
    part = fitting()
    for device in range(6):
        work_for(part, device, 4.0, 3)
    for _ in range(10):
        work_for(part, 5, 400.0, 2)
        work_for(part, 5, 4.0)
    assert part.level(5) == 1.0


@pytest.mark.parametrize("seconds", [4.0, 4.4, 16.0, 17.0, 13.5])
def test_no_flapping_at_the_edge_of_a_level(seconds):
    """Times that waver by 15% around what a level allows."""
    part = fitting()
    for device in range(5):
        work_for(part, device, 4.0, 3)
    work_for(part, 5, seconds)
    first = part.level(5)
    part.changes()
    for turn in range(100):
        work_for(part, 5, seconds * (0.85, 1.0, 1.15, 1.1, 0.9)[turn % 5])
    assert part.level(5) == first
    assert part.changes() == []


def test_every_further_change_takes_three_tasks():
    part = fitting()
    for device in range(6):
        work_for(part, device, 12.0 if device == 5 else 4.0, 3)
    work_for(part, 5, 200.0, 2)
    assert part.level(5) == 0.5
    work_for(part, 5, 200.0)
    assert part.level(5) == 0.25
    work_for(part, 5, 1.0, 2)
    assert part.level(5) == 0.25
    work_for(part, 5, 1.0)
    assert part.level(5) == 1.0


def test_a_task_counts_by_what_it_carried():
    """An upload of the whole model that comes in late, after the device was narrowed."""
    part = settled()
    assert part.level(3) == 0.5
    part.hear(done(3, 10.0))
    part.hear(done(3, 2.5, WIDE))
    part.hear(done(3, 10.0))
    assert part.level(3) == 0.5
    assert part.changes() == []


def test_state_round_trip():
    whole, first = fitting(), fitting()
    story = [(d % 7, 1.0 + (d * 37 % 11) ** 2) for d in range(200)]
    for device, seconds in story[:90]:
        work_for(whole, device, seconds)
        work_for(first, device, seconds)
    second = fitting()
    second.restore(first.state())
    whole.changes()
    for device, seconds in story[90:]:
        work_for(whole, device, seconds)
        work_for(second, device, seconds)
    assert second.state() == whole.state()
    assert second.changes() == whole.changes()


# In the slots of a strategy


class Recorder:
    """A part for any slot that notes what reaches it, and has state."""

    def __init__(self):
        self.heard = []
        self.count = 0

    def __call__(self, *args):
        self.count += 1
        return [Assignment(d, MAIN) for d in list(args[0].idle)] if len(args) == 1 else MAIN

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]

    def on_timer(self, due, view):
        self.heard.append(due)

    def on_fork(self, parent, child):
        self.heard.append((parent, child))

    def on_absorb(self, into, gone):
        self.heard.append((into, gone))

    def tell(self, view):
        return [Note("told", {})]


def test_the_parts_inside_are_reached():
    route, dispatch = Recorder(), Recorder()
    strategy = measured_levels(Strategy(route=route, dispatch=dispatch), fitting())
    server = Server(torch.zeros(SIZE), strategy, TrainSpec())
    commands = server.handle(Joined(0), TimerExpired("epoch", 3))
    assert [c.kind for c in commands if isinstance(c, Note)] == ["told", "told", "dispatch"]
    server.fork(MAIN, "child")
    for slot in strategy.slots.values():
        if isinstance(slot, protocols.FollowsLineages):
            slot.on_absorb(MAIN, "child")
    expected = [TimerExpired("epoch", 3), (MAIN, "child"), (MAIN, "child")]
    assert route.heard == dispatch.heard == expected
    route.count = 5
    twin_route, twin_dispatch = Recorder(), Recorder()
    twin = measured_levels(Strategy(route=twin_route, dispatch=twin_dispatch), fitting())
    twin.restore(strategy.state())
    assert (twin_route.count, twin_dispatch.count) == (5, 1)


def test_every_optional_protocol_of_a_slot_is_passed_on():
    """A new one in core/strategy.py must be added to `Around`; only *compensate* finishes."""
    optional = {
        name
        for name, value in vars(protocols).items()
        if getattr(value, "_is_runtime_protocol", False) and value.__module__ == protocols.__name__
    }
    part = Around(None)
    passed_on = {name for name in optional if isinstance(part, getattr(protocols, name))}
    assert passed_on == optional - {"DelayedCompensation"} >= {"Stateful"}


def test_plain_parts_are_left_in_peace():
    part = Around(protocols.same_lineage)
    part.restore(part.state())
    part.on_timer(TimerExpired("epoch", 0), None)
    part.on_fork(MAIN, "child")
    part.on_absorb(MAIN, "child")
    assert list(part.tell(None)) == []


def fitted_run(name="fedasync", at_least=3, fleet=None):
    server = toy_server(name)
    part = fitting(at_least=at_least)
    twin = Server(
        torch.zeros(SIZE),
        measured_levels(server.strategy, part),
        TrainSpec(lr=0.5),
        seed=7,
        networks=server.network,
    )
    return ToyRun(twin, fleet or toy_fleet()), part


def carried(run):
    """What the open tasks carry, by device."""
    return {task.device: task.submodel for task in run.server.open_tasks.values()}


def test_slow_devices_carry_less_and_the_log_tells():
    run, part = fitted_run()
    run.until(60)
    assert carried(run) == {device: part.submodel(device) for device in range(5)}
    assert part.submodel(0) is None
    assert part.submodel(4) is not None
    levels = run.lines("level")
    assert levels
    assert {*levels[0][1]} == {"device", "width", "seconds"}
    assert levels[-1][1]["width"] == part.level(levels[-1][1]["device"])
    # What they sent was as large as what they carried.
    sizes = {(f["device"], f["bytes"]) for _, f in run.lines("arrival")}
    assert (4, 4 * SIZE) in sizes
    assert (4, 4 * NARROW.size) in sizes or (4, 4 * WIDE.size) in sizes


def test_before_anyone_is_fitted_nothing_differs():
    plain = ToyRun(toy_server("fedasync"), toy_fleet(3))
    run, part = fitted_run(at_least=4, fleet=toy_fleet(3))
    plain.until(40)
    run.until(40)
    assert run.log == plain.log
    assert run.heads() == plain.heads()
    assert {part.level(device) for device in range(3)} == {1.0}


def test_fedasync_leaves_what_nobody_carries():
    server = Server(
        torch.zeros(SIZE), measured_levels(fedasync(), fitting(slack=1e-9)), TrainSpec()
    )
    run = ToyRun(server, toy_fleet())
    run.until(30)
    heads = server.store.head_params()
    before = heads[2:].clone()
    assert set(carried(run).values()) == {NARROW}
    run.until(60)
    assert torch.equal(server.store.head_params()[2:], before)
    assert not torch.equal(server.store.head_params()[:2], heads[:2])


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_strategy_can_be_fitted(name):
    one, _ = fitted_run(name)
    two, _ = fitted_run(name)
    one.until(60)
    two.until(60)
    assert one.log == two.log
    assert one.heads() == two.heads()
    sizes = {fields.get("bytes", 0) for _, fields in one.lines("arrival")}  # 0: skipped
    assert sizes & {4 * WIDE.size, 4 * NARROW.size}


@pytest.mark.parametrize("name", ["fedasync", "fedavg", "oort", "safa", "fedsea", "asyn-tiers"])
@pytest.mark.parametrize("after", [2, 11])
def test_checkpoint_and_resume_give_the_same_history(name, after):
    whole, _ = fitted_run(name)
    whole.until(after)
    whole.until(60)
    first, _ = fitted_run(name)
    first.until(after)
    second = first.carried_over(fitted_run(name)[0])
    second.until(60)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()


def test_declared_levels_are_carried_throughout():
    submodels = [None, None, WIDE, WIDE, NARROW]
    strategy = declared_levels(toy_server("fedavg").strategy, submodels)
    run = ToyRun(Server(torch.zeros(SIZE), strategy, TrainSpec()), toy_fleet())
    run.until(20)
    for _, fields in run.lines("arrival"):
        submodel = submodels[fields["device"]]
        assert fields["bytes"] == 4 * (submodel.size if submodel else SIZE)
    assert strategy.state()["dispatch"]["inner"] == strategy.dispatch.inner.state()


def test_a_declared_sub_model_gives_way_to_the_fitted_one():
    server = Server(torch.zeros(SIZE), measured_levels(fedasync(), fitting()), TrainSpec())
    (task,) = [c.task for c in server.handle(Joined(0, NARROW)) if isinstance(c, Send)]
    assert task.submodel is None

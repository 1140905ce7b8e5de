"""The width of each device's sub-model: levels by hand, no flapping, in every strategy."""

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    MAIN,
    Contribution,
    Joined,
    Task,
    TimerExpired,
    TrainSpec,
    Update,
)
from latecomer.core.outcomes import Note
from latecomer.core.server import Server
from latecomer.core.strategy import Assignment, Strategy
from latecomer.core.submodel import Submodel, name_of
from latecomer.strategies.papers.fedasync import fedasync
from latecomer.strategies.parts.submodel_levels import (
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
    update = Update(0, torch.zeros(2), 1)
    return Contribution(task, update, task.params, update.delta, MAIN, 0, seconds=seconds)


def arrive(part, contribution):
    part.on_arrival(contribution, None)


def changes(part):
    """The log lines of the levels that have changed."""
    return list(part.act(None))


def work_for(part, device, whole_seconds, tasks=1):
    """The device does tasks at its level, each as long as that much of the whole model takes."""
    for _ in range(tasks):
        submodel = part.submodel(device)
        arrive(
            part, done(device, whole_seconds * WORK[submodel.name if submodel else ""], submodel)
        )


def settled(**options):
    """Five devices that take 1, 2, 4, 10 and 100 s for the whole model, one task each."""
    part = fitting(min_devices=5, **options)
    for device, seconds in enumerate((1.0, 2.0, 4.0, 10.0, 100.0)):
        arrive(part, done(device, seconds))
    changes(part)
    return part


# The first assignment


def test_every_device_trains_the_whole_model_until_three_are_measured():
    part = fitting()
    arrive(part, done(0, 1.0))
    arrive(part, done(0, 1.0))
    arrive(part, done(7, 100.0))
    assert [part.level(device) for device in (0, 7, 3)] == [1.0, 1.0, 1.0]
    assert changes(part) == []
    arrive(part, done(3, 4.0))  # the median is 4: 100 * 0.0625 is more, but nothing is narrower
    assert [part.level(device) for device in (0, 7, 3)] == [1.0, 0.25, 1.0]
    assert part.submodel(7) is NARROW
    assert part.submodel(0) is None
    assert changes(part) == [Note("level", {"device": 7, "width": 0.25, "seconds": 100.0})]
    assert changes(part) == []


def test_the_widest_whose_time_is_at_most_the_median():
    part = fitting(min_devices=5)
    for device, seconds in enumerate((1.0, 2.0, 4.0, 16.0, 16.1)):
        arrive(part, done(device, seconds))
    # The median is 4 s: 16 s is 4 s at a quarter of the work, 16.1 s is more.
    assert [part.level(device) for device in range(5)] == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert [note.fields["device"] for note in changes(part)] == [3, 4]


def test_a_newcomer_is_fitted_after_its_first_task():
    part = settled()
    assert part.level(9) == 1.0
    arrive(part, done(9, 11.0))  # the lower median of 1, 2, 4, 10, 11, 100 is 4
    assert part.level(9) == 0.5


def test_slack_allows_for_more():
    tight, loose = settled(), settled(slack=3.0)
    assert tight.level(3) == 0.5
    assert loose.level(3) == 1.0  # 10 <= 3 * 4


def test_slack_below_one_narrows_even_the_median_device():
    part = fitting(slack=0.5)
    for device in range(3):
        arrive(part, done(device, 1.0))
    assert {part.level(device) for device in range(3)} == {0.5}


def test_tasks_that_take_no_time():
    part = fitting()
    for device in range(4):
        arrive(part, done(device, 0.0))
    assert {part.level(device) for device in range(4)} == {1.0}


def test_narrowing_the_upper_half_does_not_move_the_median():
    """Tasks with 3 s of fixed costs: narrow ones show little of the time of the whole model."""
    part = fitting(min_devices=4)

    def work(device, seconds):
        submodel = part.submodel(device)
        share = WORK[name_of(submodel)]
        arrive(part, done(device, 3.0 + seconds * share, submodel))

    for _ in range(30):
        for device, seconds in enumerate((1.0, 2.0, 5.0, 9.0)):
            work(device, seconds)
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
    assert changes(part) == [Note("level", {"device": 5, "width": 0.5, "seconds": 12.0})]
    work_for(part, 5, 12.0, 20)
    assert changes(part) == []


def test_a_level_is_kept_while_at_most_a_fifth_too_slow():
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
    changes(part)
    for task in range(100):
        work_for(part, 5, seconds * (0.85, 1.0, 1.15, 1.1, 0.9)[task % 5])
    assert part.level(5) == first
    assert changes(part) == []


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


def test_a_task_counts_by_its_own_sub_model():
    """An upload of the whole model that arrives late, after the device was narrowed."""
    part = settled()
    assert part.level(3) == 0.5
    arrive(part, done(3, 10.0))
    arrive(part, done(3, 2.5, WIDE))
    arrive(part, done(3, 10.0))
    assert part.level(3) == 0.5
    assert changes(part) == []


def test_state_round_trip():
    whole, first = fitting(), fitting()
    times = [(d % 7, 1.0 + (d * 37 % 11) ** 2) for d in range(200)]
    for device, seconds in times[:90]:
        work_for(whole, device, seconds)
        work_for(first, device, seconds)
    second = fitting()
    second.restore(first.state())
    changes(whole)
    for device, seconds in times[90:]:
        work_for(whole, device, seconds)
        work_for(second, device, seconds)
    assert second.state() == whole.state()
    assert changes(second) == changes(whole)


# In a strategy


class Hooked:
    """Route or dispatch: counts its calls, and keeps the hooks that are called."""

    def __init__(self):
        self.hooks, self.calls = [], 0

    def __call__(self, *args):
        self.calls += 1
        return [Assignment(d, MAIN) for d in list(args[0].idle)] if len(args) == 1 else MAIN

    def state(self):
        return {"calls": self.calls}

    def restore(self, state):
        self.calls = state["calls"]

    def on_timer(self, timer, view):
        self.hooks.append(timer)

    def on_fork(self, parent, child):
        self.hooks.append((parent, child))

    def on_absorb(self, into, gone):
        self.hooks.append((into, gone))

    def act(self, view):
        return [Note("hooked", {})]


def hooked_server():
    plain = Strategy(route=Hooked(), dispatch=Hooked())
    return Server(torch.zeros(SIZE), measured_levels(plain, fitting()), TrainSpec())


def test_hooks_of_the_dispatch_inside_are_called():
    server = hooked_server()
    route, inside = server.strategy.route, server.strategy.dispatch.inner
    commands = server.handle(Joined(0), TimerExpired("epoch", 3))
    assert len(logged(commands, "hooked")) == 2
    server.fork(MAIN, "child")
    server.absorb(MAIN, "child")
    expected = [TimerExpired("epoch", 3), (MAIN, "child"), (MAIN, "child")]
    assert route.hooks == inside.hooks == expected
    route.calls = 5
    twin = hooked_server()
    twin.restore(server.state())
    assert (twin.strategy.route.calls, twin.strategy.dispatch.inner.calls) == (5, 1)


def fitted_run(name="fedasync", min_devices=3, fleet=None):
    server = toy_server(name)
    twin = Server(
        torch.zeros(SIZE),
        measured_levels(server.strategy, fitting(min_devices=min_devices)),
        TrainSpec(lr=0.5),
        seed=7,
        networks=server.network,
    )
    return ToyRun(twin, fleet or toy_fleet()), twin.strategy.observers[-1]


def submodels_of(run):
    """The sub-models of the open tasks, by device."""
    return {task.device: task.submodel for task in run.server.open_tasks.values()}


def test_slow_devices_train_less_and_changes_are_logged():
    run, part = fitted_run()
    run.until(60)
    assert submodels_of(run) == {device: part.submodel(device) for device in range(5)}
    assert part.submodel(0) is None
    assert part.submodel(4) is not None
    levels = run.lines("level")
    assert levels
    assert {*levels[0][1]} == {"device", "width", "seconds"}
    assert levels[-1][1]["width"] == part.level(levels[-1][1]["device"])
    # Uploads are as large as the sub-models.
    sizes = {(f["device"], f["bytes"]) for _, f in run.lines("arrival")}
    assert (4, 4 * SIZE) in sizes
    assert (4, 4 * len(NARROW.index)) in sizes or (4, 4 * len(WIDE.index)) in sizes


def test_before_devices_are_fitted_nothing_differs():
    plain = ToyRun(toy_server("fedasync"), toy_fleet(3))
    run, part = fitted_run(min_devices=4, fleet=toy_fleet(3))
    plain.until(40)
    run.until(40)
    assert run.log == plain.log
    assert run.heads() == plain.heads()
    assert {part.level(device) for device in range(3)} == {1.0}


def test_fedasync_leaves_coordinates_that_no_device_trains():
    server = Server(
        torch.zeros(SIZE), measured_levels(fedasync(), fitting(slack=1e-9)), TrainSpec()
    )
    run = ToyRun(server, toy_fleet())
    run.until(30)
    heads = server.store.head_params()
    before = heads[2:].clone()
    assert {name_of(submodel) for submodel in submodels_of(run).values()} == {"narrow"}
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
    assert sizes & {4 * len(WIDE.index), 4 * len(NARROW.index)}


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


def test_declared_levels_are_kept_throughout():
    submodels = [None, None, WIDE, WIDE, NARROW]
    strategy = declared_levels(toy_server("fedavg").strategy, submodels)
    run = ToyRun(Server(torch.zeros(SIZE), strategy, TrainSpec()), toy_fleet())
    run.until(20)
    for _, fields in run.lines("arrival"):
        submodel = submodels[fields["device"]]
        assert fields["bytes"] == 4 * (len(submodel.index) if submodel else SIZE)
    assert run.server.state()["parts"]["dispatch.inner"] == {"begun": run.server.store.head()}


def test_a_fitted_sub_model_replaces_the_declared_one():
    server = Server(torch.zeros(SIZE), measured_levels(fedasync(), fitting()), TrainSpec())
    (task,) = sends(server.handle(Joined(0, NARROW)))
    assert task.submodel is None

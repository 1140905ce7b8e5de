"""What every registered strategy must do. A new one joins by being registered."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from commands import sends
from latecomer.core.codec import encode
from latecomer.core.messages import Arrived, Joined, Task, TrainSpec, Update
from latecomer.core.outcomes import Outcome
from latecomer.core.server import Server
from latecomer.core.strategy import Assignment
from latecomer.core.submodel import Submodel
from latecomer.device.flat import FlatModel
from latecomer.strategies.recipe import build_strategy, recipes
from toy import SIZE, ToyRun, ToyTrainer, server_of, toy_fleet, toy_run, toy_server, toy_strategy

ALL = sorted(recipes())
# Four parameters, and the mean and the variance of a BatchNorm.
NORMALISED = FlatModel(lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), (1,), 1)
pytestmark = pytest.mark.parametrize("name", ALL)


def test_is_described(name):
    recipe = recipes()[name]
    assert recipe.summary
    assert recipe.paper
    assert build_strategy(name).name == name


def test_same_seed_same_history(name):
    one, two = toy_run(name), toy_run(name)
    assert one.log == two.log
    assert one.heads() == two.heads()
    assert one.server.accepted == 40


def test_one_strategy_serves_many_runs(name):
    """Every run works on a copy of its own, so the first leaves no trace in the next."""
    strategy, heads = toy_strategy(name), []
    for _ in range(3):
        run = ToyRun(server_of(strategy), toy_fleet())
        run.until(15)
        heads.append(run.heads())
    assert heads == [toy_run(name, 15).heads()] * 3


def test_memory_is_bounded_by_open_tasks(name):
    """And the model moves and stays finite."""
    run = toy_run(name, 200)
    used = {run.server.lineage_of(device) for device in range(5)}
    for lineage in used:
        params = run.server.store.head_params(lineage)
        assert torch.isfinite(params).all()
        # Every device pulls towards its own id, from 0 to 4.
        assert -1 < params.mean() < 5
    assert any(run.server.store.head_params(lineage).abs().max() > 0.01 for lineage in used)
    run.until(500)
    store = run.server.store
    assert len(store.versions) <= len(run.server.open_tasks) + len(store.lineages)


def test_buffers_stay_between_those_of_the_devices(name):
    """Statistics of BatchNorm are averaged: no step of stale deltas makes a variance negative.

    The initial value is 10. The trained value of a device is near its id, from 0 to 4.
    """
    small = {"size": 1} if "size" in recipes()[name].options and name != "feddc" else {}
    strategy = toy_strategy(name, small)
    initial = torch.tensor([0.0, 0.0, 0.0, 0.0, 10.0, 10.0])
    server = Server(initial, strategy, TrainSpec(lr=0.5), seed=7, networks=lambda _: NORMALISED)
    run, lowest = ToyRun(server, toy_fleet(), trainer=Converged()), 10.0
    for updates in range(1, 61):
        run.until(updates)
        heads = [server.store.head_params(lineage)[4:] for lineage in server.store.lineages]
        lowest = min(lowest, torch.stack(heads).min().item())
    assert -0.5 < lowest < 6.0  # points have noise with a deviation of 0.1


class Converged(ToyTrainer):
    """delta = point of the device - params."""

    def update(self, task: Task, rebases: tuple = ()) -> Update:
        update = super().update(task, rebases)
        return replace(update, delta=2 * update.delta)


def test_a_replay_of_its_events_is_bit_identical(name):
    """The server is pure: the recorded events give the same model without any engine."""
    server, fed = toy_server(name), []
    handle = server.handle
    server.handle = lambda *events: (fed.append(events), handle(*events))[1]
    run = ToyRun(server, toy_fleet())
    run.until(60)
    twin = toy_server(name)
    for events in fed:
        twin.handle(*events)
    heads = {n: twin.store.head_params(n).tolist() for n in twin.store.lineages}
    assert heads == run.heads()
    assert twin.store.versions == server.store.versions


STOPS = (1, 7, 23, 60)


def resumes_to_the_same(make):
    """A run that is resumed at every stop but the last gives the log and models of a whole one."""
    whole, resumed, log = make(), make(), []
    for stop in STOPS:
        whole.until(stop)  # where a run stops may cut one moment in two, so both stop here
        resumed.until(stop)
        if stop != STOPS[-1]:
            log += resumed.log
            resumed = resumed.carried_over(make())
    assert log + resumed.log == whole.log
    assert resumed.heads() == whole.heads()


def test_checkpoint_and_resume_give_the_same_history(name):
    resumes_to_the_same(lambda: ToyRun(toy_server(name), toy_fleet()))


def test_lost_devices_are_tolerated_and_their_versions_unpinned(name):
    """A version is pinned as often as open tasks were sent it."""
    fleet = toy_fleet(5, crash=0.2, restart_seconds=3, detect_seconds=1)
    run = toy_run(name, 100, fleet)
    assert run.server.accepted == 100
    assert run.lines("drop")
    assert {f["device"] for _, f in run.lines("arrival")} == set(range(5))
    store, tasks = run.server.store, run.server.open_tasks.values()
    sent = [version for task in tasks for version in task.versions]
    assert all(store.pins(version) == sent.count(version) for version in store.versions)
    assert set(sent) <= set(store.versions)


def test_an_update_counts_once(name):
    server = toy_server(name)
    (task, *_), update = first_update(server)
    server.handle(Arrived(task.device, update))
    before = {n: server.store.head_params(n).clone() for n in server.store.lineages}
    commands = server.handle(Arrived(task.device, update))
    assert [c.kind for c in commands if isinstance(c, Outcome)] == ["refusal"]
    assert all(torch.equal(server.store.head_params(n), before[n]) for n in before)


def test_a_hostile_update_leaves_the_model_untouched(name):
    server = toy_server(name)
    tasks, _ = first_update(server)
    before = {n: server.store.head_params(n).clone() for n in server.store.lineages}
    poison = [torch.full((SIZE,), float("nan")), torch.full((SIZE,), 3e38), torch.zeros(SIZE + 1)]
    for task, bad in zip(tasks, poison, strict=False):
        commands = server.handle(Arrived(task.device, Update(task.id, bad, 1)))
        assert any(c.kind == "refusal" for c in commands if isinstance(c, Outcome))
    assert all(torch.equal(server.store.head_params(n), before[n]) for n in before)
    assert server.accepted == 0


def test_untrained_coordinates_stay_bit_unchanged(name):
    server = toy_server(name)
    covered = Submodel("half", torch.tensor([0, 2, 4]))
    tasks = sends(server.handle(Joined(0, covered), Joined(1, covered)))
    before = {n: server.store.head_params(n)[[1, 3, 5]] for n in server.store.lineages}
    for _ in range(10):
        assert {t.params.numel() for t in tasks} == {3}
        answers = [Arrived(t.device, Update(t.id, torch.full((3,), 0.37), 5)) for t in tasks]
        tasks = sends(server.handle(*answers))
    for lineage in server.store.lineages:
        untrained = server.store.head_params(lineage)[[1, 3, 5]]
        assert torch.equal(untrained, before.get(lineage, torch.zeros(3)))
    assert any(server.store.head_params(n)[0] != 0 for n in server.store.lineages)


# Sub-models of devices may change at any time. No device trains coordinate 5.

EVEN, START, ONE = (
    Submodel(name, torch.tensor(index))
    for name, index in (("even", [0, 2, 4]), ("start", [0, 1, 2, 3, 4]), ("one", [2]))
)


class Changing:
    """Dispatch: the assignments of `inner`, each device with another sub-model in every task."""

    def __init__(self, inner, parts):
        self.inner, self.parts = inner, parts

    def __call__(self, view):
        for request in self.inner(view):
            number = view.tasks_given // 4 + getattr(request, "device", 0)
            submodel = self.parts[number % len(self.parts)]
            is_task = isinstance(request, Assignment)
            yield request._replace(submodel=submodel) if is_task else request


def changing_run(name, parts, fleet=None, options=None):
    plain = toy_strategy(name, options)
    strategy = replace(plain, dispatch=Changing(plain.dispatch, parts))
    return ToyRun(server_of(strategy), fleet or toy_fleet())


def test_devices_may_change_their_sub_models(name):
    run, begun = changing_run(name, (EVEN, START, ONE)), {}
    store = run.server.store
    for updates in range(1, 121):
        for lineage in store.lineages:
            begun.setdefault(lineage, store.head_params(lineage)[5].clone())
        run.until(updates)
    assert not run.lines("refusal")
    assert {f["bytes"] for _, f in run.lines("arrival") if "bytes" in f} == {4 * 1, 4 * 3, 4 * 5}
    for lineage in store.lineages:
        head = store.head_params(lineage)
        assert torch.isfinite(head).all()
        assert head[5] == begun.get(lineage, 0.0)
    assert any(store.head_params(lineage)[2] != 0 for lineage in store.lineages)


def test_sub_models_and_whole_models_take_turns(name):
    run = changing_run(name, (None, EVEN, None, ONE, START))
    run.until(200)
    assert run.server.accepted == 200
    for lineage in {run.server.lineage_of(device) for device in range(5)}:
        params = run.server.store.head_params(lineage)
        assert torch.isfinite(params).all()
        assert -1 < params.mean() < 5


def test_checkpoint_and_resume_with_changing_sub_models(name):
    resumes_to_the_same(lambda: changing_run(name, (EVEN, None, ONE, START)))


def test_lost_devices_with_changing_sub_models_are_tolerated(name):
    fleet = toy_fleet(5, crash=0.2, restart_seconds=3, detect_seconds=1)
    run = changing_run(name, (EVEN, START, ONE), fleet)
    run.until(100)
    assert run.server.accepted == 100
    assert run.lines("drop")


def test_a_device_may_join_again_with_another_sub_model(name):
    server = toy_server(name)
    tasks = sends(server.handle(*(Joined(device, EVEN) for device in range(3))))
    begun = {n: server.store.head_params(n)[5].clone() for n in server.store.lineages}
    for step in range(12):
        part = (EVEN, START, ONE)[step % 3]
        answers = [
            Arrived(t.device, Update(t.id, torch.full((t.params.numel(),), 0.1), 5)) for t in tasks
        ]
        tasks = sends(server.handle(*answers, *(Joined(device, part) for device in range(3))))
        assert {t.submodel for t in tasks} <= {part}
        for lineage, before in begun.items():
            assert server.store.head_params(lineage)[5] == before
    assert server.accepted >= 12
    assert all(torch.isfinite(server.store.head_params(n)).all() for n in server.store.lineages)


# A device whose privacy budget is spent sends one more update, or none.


def test_devices_that_retire_get_no_more_tasks(name):
    server = toy_server(name)
    tasks = sends(server.handle(*(Joined(device) for device in range(4))))
    retired, notes = set(), []
    for step in range(30):
        answers = []
        for task in tasks:
            last = task.device < 2 and step > 1
            silent = last and task.device == 0
            retired |= {task.device} if last else set()
            delta = None if silent else torch.full((SIZE,), 0.1)
            answers.append(Arrived(task.device, Update(task.id, delta, 5, epsilon=1.5, last=last)))
        commands = server.handle(*answers, Joined(0), Joined(1))
        notes += [c for c in commands if isinstance(c, Outcome) and c.kind == "retire"]
        tasks = sends(commands)
        assert not retired & {task.device for task in tasks}
        if not tasks:
            break
        state, server = server.state(), toy_server(name)
        server.restore(state)  # retirement survives a checkpoint
    assert retired <= {0, 1}
    assert sorted(note.fields["device"] for note in notes) == sorted(retired)
    # Devices with a budget left go on.
    assert {task.device for task in tasks} <= {2, 3}
    assert tasks


def first_update(server):
    tasks = sends(server.handle(*(Joined(device) for device in range(3))))
    return tasks, Update(tasks[0].id, torch.ones(SIZE), 4)


def test_a_checkpoint_is_strict_json(name):
    run = toy_run(name, 30)
    tree, _ = encode({"server": run.server.state(), "engine": run.engine.state()})
    json.dumps(tree, allow_nan=False)

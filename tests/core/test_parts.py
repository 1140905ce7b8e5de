"""How the parts of a strategy are found, called and restored."""

import functools
import threading
from dataclasses import replace

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Broadcast,
    Joined,
    ServingSettings,
    TimerExpired,
    Update,
)
from latecomer.core.parts import HOOKS, Parts
from latecomer.core.strategy import Commit, Mix, Observer, Strategy, full_weight
from latecomer.errors import BadInput
from latecomer.strategies.parts.broadcasts import Broadcasting
from latecomer.strategies.parts.catch_up import CatchUp
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.dispatching import AtEpochStart
from latecomer.strategies.parts.merging import Epochs
from latecomer.strategies.parts.selecting import Oort
from latecomer.strategies.parts.weighting import ByShareOfExamples
from toy import EXAMPLES, SIZE, ToyRun, server_of, toy_fleet


class Counter(Observer):
    """Counts the commits it is shown."""

    def __init__(self, inner=None):
        self.commits, self.inner = 0, inner

    def on_commit(self, commit, view):
        self.commits += 1

    def weigh(self, contribution, view):
        return 1.0

    def state(self):
        return {"commits": self.commits}

    def restore(self, state):
        self.commits = state["commits"]


class Weigher:
    """A callable without hooks that holds a part."""

    def __init__(self, part):
        self.part = part

    def __call__(self, contribution, view):
        return 1.0


class Box:
    """Neither callable nor a part."""

    def __init__(self, inner):
        self.inner = inner


class Actor(Observer):
    def __init__(self, *actions):
        self.actions = actions

    def act(self, view):
        return self.actions


def weigh(part, contribution, view):
    return 1.0


def shown(strategy, commits=1):
    parts = Parts(strategy)
    for _ in range(commits):
        parts.on_commit(Commit("main", None, 1), None)
    return {path: part.commits for path, part in parts.by_path.items()}


def test_every_part_is_found_by_its_path_and_called_once():
    shared = Counter()
    strategy = Strategy(
        route=Weigher(Counter()),
        weigh=functools.partial(weigh, shared),
        compensate=Counter().weigh,
        dispatch=Counter(inner=[Counter(), shared]),
        observers=(shared, Counter(inner=Counter()), Box(Box(Counter()))),
    )
    assert shown(strategy, 2) == dict.fromkeys(
        [
            "route.part",
            "compensate",
            "weigh.1",
            "dispatch",
            "dispatch.inner.0",
            "observers.1",
            "observers.1.inner",
            "observers.2.inner.inner",
        ],
        2,
    )


def test_a_slot_without_hooks_may_hold_parts():
    merge = Mix()
    merge.part = Counter()
    assert shown(Strategy(merge=merge)) == {"merge.part": 1}


def test_classes_and_plain_data_are_no_parts():
    strategy = Strategy(observers=(Counter(inner=Counter), Counter(inner=torch.ones(2))))
    assert list(shown(strategy)) == ["observers.0", "observers.1"]


def test_the_parts_of_a_run_are_copies():
    given = Counter()
    parts = Parts(Strategy(observers=(given,)))
    parts.on_commit(Commit("main", None, 1), None)
    (copied,) = parts.strategy.observers
    assert (given.commits, copied.commits) == (0, 1)


def test_actions_of_all_parts_in_order():
    parts = Parts(Strategy(dispatch=Actor("a"), observers=(Actor("b", "c"), Actor(), Counter())))
    assert list(parts.act(None)) == ["a", "b", "c"]


def test_every_hook_gets_its_arguments():
    calls = []

    class All(Observer):
        def __deepcopy__(self, memo):
            return self

        def on_arrival(self, contribution, view):
            calls.append(("on_arrival", contribution, view))

        def on_contribution(self, contribution, view):
            calls.append(("on_contribution", contribution, view))

        def on_fork(self, parent, child):
            calls.append(("on_fork", parent, child))

        def on_absorb(self, into, gone):
            calls.append(("on_absorb", into, gone))

        def on_timer(self, timer, view):
            calls.append(("on_timer", timer, view))

    parts, expected = Parts(Strategy(observers=(All(),))), []
    for hook in ("on_arrival", "on_contribution", "on_fork", "on_absorb", "on_timer"):
        getattr(parts, hook)("first", "second")
        expected.append((hook, "first", "second"))
    assert calls == expected


@pytest.mark.parametrize(("declared", "broadcasts"), [(None, False), (False, False), (True, True)])
def test_parts_that_act_may_broadcast(declared, broadcasts):
    actor = Actor()
    if declared is not None:
        actor.broadcasts = declared
    assert Parts(Strategy(observers=(Counter(), actor))).broadcasts is broadcasts


def test_a_part_without_the_base_class_may_broadcast_if_it_acts():
    class Plain:
        def act(self, view):
            return ()

    class Silent:
        def on_commit(self, commit, view): ...

    assert Parts(Strategy(merge=Plain())).broadcasts
    assert not Parts(Strategy(merge=Silent())).broadcasts


def test_states_are_restored_by_path():
    first, second = (Parts(Strategy(observers=(Counter(), Counter()))) for _ in range(2))
    first.by_path["observers.1"].commits = 5
    assert first.state() == {"observers.0": {"commits": 0}, "observers.1": {"commits": 5}}
    second.restore(first.state())
    assert [part.commits for part in second.strategy.observers] == [0, 5]


def test_the_state_of_another_strategy_is_refused():
    one, none = Parts(Strategy(observers=(Counter(),))), Parts(Strategy())
    with pytest.raises(ValueError, match=r"state for observers.0; this strategy has none"):
        none.restore(one.state())
    with pytest.raises(ValueError, match=r"state for none; this strategy has observers.0"):
        one.restore(none.state())


def test_a_function_that_keeps_a_part_is_refused():
    part, number = Counter(), 3

    def harmless(contribution, view):
        return number

    def sharing(contribution, view):
        return part.commits

    def twice(contribution, view):
        return 2 * sharing(contribution, view)

    assert Parts(Strategy(weigh=harmless)).by_path == {}
    expected = "'mine': the function in {} keeps the part 'part', .*; use a class that holds"
    with pytest.raises(BadInput, match=expected.format("weigh")):
        Parts(Strategy("mine", weigh=sharing))
    with pytest.raises(BadInput, match=expected.format("route.sharing")):
        Parts(Strategy("mine", route=twice))


def test_a_strategy_that_cannot_be_copied_is_refused():
    merge = Mix()
    merge.lock = threading.Lock()
    with pytest.raises(BadInput, match=r"'mine' cannot be copied .*lock.*; give a function"):
        Parts(Strategy("mine", merge=merge))


# In a server


class Recording(Observer):
    """Records the hooks that are called."""

    def __init__(self):
        self.called = []

    def on_arrival(self, contribution, view):
        self.called.append("on_arrival")

    def on_contribution(self, contribution, view):
        self.called.append("on_contribution")

    def on_commit(self, commit, view):
        self.called.append("on_commit")

    def on_fork(self, parent, child):
        self.called.append("on_fork")

    def on_absorb(self, into, gone):
        self.called.append("on_absorb")

    def on_timer(self, timer, view):
        self.called.append("on_timer")

    def act(self, view):
        self.called.append("act")
        return ()


def test_the_server_calls_every_hook():
    server = server_of(Strategy(observers=(Recording(),)))
    (part,) = server.strategy.observers
    (task,) = sends(server.handle(Joined(0)))
    part.called.clear()
    update = Update(task.id, torch.ones(SIZE), EXAMPLES)
    server.handle(Arrived(0, update), TimerExpired("epoch", 0))
    server.fork(MAIN, "child")
    server.absorb(MAIN, "child")
    moment = ["on_arrival", "on_contribution", "on_commit", "on_timer", "act"]
    assert part.called == [*moment, "on_fork", "on_absorb"]
    assert sorted(part.called) == sorted(HOOKS)


class Adding(Observer):
    """Doubles the model and adds `amount`, and appends it to the class prior."""

    def __init__(self, amount):
        self.amount = amount

    def deployed(self, params, lineage, view):
        return 2 * params + self.amount

    def serving(self, settings, lineage, view):
        return replace(settings, class_prior=(*settings.class_prior, self.amount, lineage))


def test_the_deployed_model_and_the_settings_pass_through_all_parts_in_order():
    server = server_of(Strategy(observers=(Adding(1.0), Recording(), Adding(5.0))))
    assert server.model().tolist() == [2 * 1.0 + 5.0] * SIZE
    assert server.store.head_params().tolist() == [0.0] * SIZE
    assert server.serving_settings(MAIN).class_prior == (1.0, MAIN, 5.0, MAIN)
    assert Parts(Strategy(observers=(Adding(3.0),))).folded("deployed", 4.0, MAIN, None) == 11.0


def test_without_such_parts_the_head_is_deployed():
    server = server_of(Strategy(observers=(Recording(),)))
    assert server.model() is server.store.head_params()
    assert server.serving_settings(MAIN) == ServingSettings()


def test_the_model_of_an_absorbed_lineage_is_that_of_the_other():
    server = server_of(Strategy(observers=(Adding(1.0),)))
    server.fork(MAIN, "gone")
    server.absorb(MAIN, "gone")
    assert server.serving_settings("gone").class_prior == (1.0, MAIN)
    assert server.model("gone").tolist() == [1.0] * SIZE


def test_a_part_inside_another_keeps_its_state_in_the_checkpoint():
    strategy = Strategy(weigh=CatchUp(ByShareOfExamples(), 2.0))
    run = ToyRun(server_of(strategy), toy_fleet())
    run.until(40)
    assert run.server.state()["parts"]["weigh.weigh"] == {
        "examples": dict.fromkeys(range(5), EXAMPLES),
        "total": 5 * EXAMPLES,
    }
    twin = run.carried_over(ToyRun(server_of(strategy), toy_fleet()))
    assert twin.server.strategy.weigh.weigh.state() == run.server.strategy.weigh.weigh.state()
    for each in (run, twin):
        each.until(80)
    assert twin.heads() == run.heads()


def test_an_epoch_ends_at_its_timer_with_an_observer_that_broadcasts():
    strategy = Strategy(
        merge=Epochs(),
        dispatch=AtEpochStart(timeout=10.0),
        observers=(Broadcasting("always"),),
    )
    server = server_of(strategy)
    first, _ = sends(server.handle(Joined(0), Joined(1)))
    commands = server.handle(Arrived(0, Update(first.id, torch.ones(SIZE), EXAMPLES)))
    assert not logged(commands, "commit")  # device 1 has not answered
    commands = server.handle(TimerExpired("epoch", 0))
    assert [fields["updates"] for fields in logged(commands, "commit")] == [1]
    (broadcast,) = [c for c in commands if isinstance(c, Broadcast)]
    assert [task.device for task in broadcast.tasks] == [1]


class RecordingOort(Oort):
    """Oort, and the devices whose updates it was passed."""

    def __init__(self, fraction):
        super().__init__(fraction)
        self.arrived = []

    def on_arrival(self, contribution, view):
        super().on_arrival(contribution, view)
        self.arrived.append(contribution.task.device)


def test_clustering_acts_and_a_selection_receives_arrivals_in_one_strategy():
    strategy = Strategy(
        route=Clustering(1, 4, every=5, ask=0),
        merge=Epochs(),
        dispatch=AtEpochStart(RecordingOort(1.0)),
    )
    server = server_of(strategy)
    for task in sends(server.handle(*map(Joined, range(5)))):
        metrics = {"error": 0.9 if task.device == 4 else 0.1}
        update = Update(task.id, torch.ones(SIZE), EXAMPLES, metrics)
        server.handle(Arrived(task.device, update))
    assert sorted(server.strategy.dispatch.select.arrived) == list(range(5))
    assert strategy.dispatch.select.arrived == []  # only the run's copy is changed
    # The review after five uploads makes the device with the largest error a seed device.
    assert server.state()["parts"]["route"]["seeds"] == {4: "cluster-1"}


def test_parts_in_tuples_lists_and_dicts_are_found():
    class Holder:
        def __init__(self):
            self.some = ([CatchUp(ByShareOfExamples(), 2.0)], {"inner": CatchUp(full_weight, 1.0)})

        def __call__(self, contribution, view):
            return 1.0

    found = Parts(Strategy(weigh=Holder())).by_path
    assert sorted(found) == ["weigh.some.0.0", "weigh.some.0.0.weigh", "weigh.some.1.inner"]

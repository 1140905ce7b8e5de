"""How the parts of a strategy are found, called and restored."""

import functools
import threading

import pytest

from latecomer.core.parts import Parts
from latecomer.core.strategy import Commit, Mix, Observer, Strategy
from latecomer.errors import BadInput


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
        observers=(shared, Counter(inner=Counter())),
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
        ],
        2,
    )


def test_a_slot_without_hooks_may_hold_parts():
    merge = Mix()
    merge.part = Counter()
    assert shown(Strategy(merge=merge)) == {"merge.part": 1}


def test_classes_and_plain_data_are_no_parts():
    strategy = Strategy(observers=(Counter(inner=Counter), Counter(inner={"a": Counter()})))
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
    with pytest.raises(ValueError, match=r"state of observers.0; this strategy keeps none"):
        none.restore(one.state())
    with pytest.raises(ValueError, match=r"state of none; this strategy keeps observers.0"):
        one.restore(none.state())


def test_a_function_that_keeps_a_part_is_refused():
    part, number = Counter(), 3

    def harmless(contribution, view):
        return number

    def sharing(contribution, view):
        return part.commits

    assert Parts(Strategy(weigh=harmless)).by_path == {}
    with pytest.raises(BadInput, match="'mine': the function in weigh keeps the part 'part'"):
        Parts(Strategy("mine", weigh=sharing))


def test_a_strategy_that_cannot_be_copied_is_refused():
    merge = Mix()
    merge.lock = threading.Lock()
    with pytest.raises(BadInput, match="'mine' cannot be copied"):
        Parts(Strategy("mine", merge=merge))

"""Hand-worked debts."""

import torch

from latecomer.core.messages import Contribution, Task, TrainSpec, Update
from latecomer.core.store import ModelStore
from latecomer.strategies.parts.catch_up import CatchUp
from latecomer.strategies.parts.weighting import by_examples


class View:
    def __init__(self):
        self.store = ModelStore(torch.zeros(1))

    def commits(self, count):
        for _ in range(count):
            self.store.commit("main", torch.zeros(1))


def contribution(version, staleness, device=7):
    task = Task(0, device, 0, "main", version, TrainSpec(), torch.zeros(1))
    zero = torch.zeros(1)
    return Contribution(task, Update(0, zero, 10), zero, zero, "main", staleness)


def test_five_silent_epochs_are_made_up_for_in_three():
    """First heard at commit 6 with an update of version 0: commits 1 to 5 went without it."""
    view, weigh = View(), CatchUp(by_examples(), max_extra=2.0)
    view.commits(6)
    found = []
    for version in range(4):
        found.append(weigh(contribution(version, staleness=0), view))
        view.commits(1)
    assert found == [30.0, 30.0, 20.0, 10.0]


def test_debts_grow_while_it_is_away_again():
    view, weigh = View(), CatchUp(by_examples(), max_extra=1.0)
    view.commits(2)
    assert weigh(contribution(0, 0), view) == 20.0
    view.commits(1)
    assert weigh(contribution(1, 0), view) == 10.0
    view.commits(4)
    assert [weigh(contribution(3, 0), view) for _ in range(1)] == [20.0]


def test_silences_are_not_added_up():
    """Heard once in five epochs: the debt is never more than one silence."""
    view, weigh = View(), CatchUp(by_examples(), max_extra=1.0)
    for cycle in range(6):
        view.commits(5)
        weigh(contribution(5 * cycle, 0), view)
        assert weigh._missed[7] <= 3.0


def test_a_device_that_was_in_time_has_no_debt():
    view, weigh = View(), CatchUp(by_examples(), max_extra=1.0)
    view.commits(2)
    weigh(contribution(0, 0), view)
    for _ in range(50):
        view.commits(1)
        weigh(contribution(view.store.commits, 0), view)
    view.commits(2)
    assert weigh(contribution(view.store.commits - 1, 0), view) == 20.0
    assert weigh._missed[7] == 0.0


def test_who_is_in_time_or_not_repaired_counts_once():
    view, weigh = View(), CatchUp(by_examples(), max_extra=2.0)
    view.commits(6)
    assert weigh(contribution(6, staleness=0), view) == 10.0
    assert weigh(contribution(0, staleness=6), view) == 10.0


def test_it_can_be_left_out():
    view, weigh = View(), CatchUp(by_examples(), max_extra=0.0)
    view.commits(6)
    assert weigh(contribution(0, 0), view) == 10.0


def test_a_checkpoint_keeps_debts():
    view, weigh = View(), CatchUp(by_examples(), max_extra=1.0)
    view.commits(6)
    weigh(contribution(0, 0), view)
    other = CatchUp(by_examples(), max_extra=1.0)
    other.restore(weigh.state())
    view.commits(1)
    assert other(contribution(1, 0), view) == weigh(contribution(1, 0), view) == 20.0

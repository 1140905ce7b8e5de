"""Branches of a fleet that may well do with one model: who judges when, and when it is divided."""

import math

import pytest
import torch

from latecomer.core.messages import MAIN, Arrived, Joined, Send, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.core.submodel import Submodel
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.dispatching import ClusterDispatch

HALF = Submodel("half", torch.tensor([0]))


class Fleet:
    """Devices that answer all at once, each with its judgement where it was asked for one."""

    def __init__(self, devices=6, submodels=None, **options):
        self.branches = Clustering(1, 4, every=1, turns=1.0, **{"listen": 1, **options})
        strategy = Strategy(route=self.branches, dispatch=ClusterDispatch(self.branches))
        self.server = Server(torch.zeros(2), strategy, TrainSpec(feedback=True))
        joined = [Joined(d, (submodels or {}).get(d)) for d in range(devices)]
        self.tasks = self.sent(self.server.handle(*joined))

    def sent(self, commands):
        return {c.task.device: c.task for c in commands if isinstance(c, Send)}

    def turn(self, judgements):
        arrived = []
        for device, task in self.tasks.items():
            error = judgements[device] if isinstance(judgements, dict) else judgements
            told = {"error": error} if task.spec.feedback else {}
            delta = torch.zeros(task.params.numel())
            arrived.append(Arrived(device, Update(task.id, delta, 1, told)))
        self.tasks |= self.sent(self.server.handle(*arrived))

    @property
    def founders(self):
        return set(self.branches._founders)


def judgement(fleet, device):
    return fleet.branches._members[device].judgement


def test_only_what_lasts_counts():
    fleet = Fleet()
    for error, seen in ((0.9, math.nan), (0.1, math.nan), (0.8, 0.1), (0.8, 0.1), (0.7, 0.7)):
        fleet.turn(error)
        assert judgement(fleet, 0) == pytest.approx(seen, nan_ok=True)


def test_a_cluster_that_still_learns_is_not_divided():
    fleet, error = Fleet(), 0.9
    for _ in range(12):
        fleet.turn(dict.fromkeys(range(6), error) | {5: 0.95})
        error *= 0.85
        assert not fleet.founders


def test_one_that_learns_no_more_is_divided_by_those_it_fails():
    fleet, good = Fleet(), dict.fromkeys(range(6), 0.05)
    for _ in range(8):
        fleet.turn(good | {4: 0.8, 5: 0.9})
        if fleet.founders:
            break
    assert fleet.founders == {5}


def test_a_world_that_changes_is_learnt_anew_before_anybody_is_parted():
    fleet = Fleet()
    for _ in range(6):
        fleet.turn(0.1)
    error = 0.9
    for _ in range(8):
        fleet.turn(error)
        error *= 0.85
        assert not fleet.founders


def test_who_carries_a_part_has_no_say():
    fleet = Fleet(submodels={5: HALF})
    for _ in range(8):
        fleet.turn(dict.fromkeys(range(6), 0.05) | {5: 0.9})
        assert not fleet.founders
    assert math.isnan(judgement(fleet, 5))


def test_devices_judge_in_every_third_task_and_are_remembered_meanwhile():
    fleet = Fleet(listen=3)
    fleet.server.spec = TrainSpec()
    asked = []
    for _ in range(7):
        asked.append(fleet.tasks[0].spec.feedback)
        fleet.turn(0.3)
    # The first was sent with the spec of the fleet.
    assert asked == [True, False, False, True, False, False, True]
    assert judgement(fleet, 0) == 0.3
    assert fleet.server.lineage_of(0) == MAIN

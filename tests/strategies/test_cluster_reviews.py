"""Clusters of a fleet that one model may serve well: when one is split, and when devices report."""

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
    """Devices that answer all at once, with their error where their task asks for feedback."""

    def __init__(self, devices=6, submodels=None, **options):
        clustering = Clustering(1, 4, **{"every": 1, "passes": 1.0, **options})
        strategy = Strategy(route=clustering, dispatch=ClusterDispatch(clustering))
        self.server = Server(torch.zeros(2), strategy, TrainSpec(feedback=True))
        joined = [Joined(d, (submodels or {}).get(d)) for d in range(devices)]
        self.tasks = self.sent(self.server.handle(*joined))

    def sent(self, commands):
        return {c.task.device: c.task for c in commands if isinstance(c, Send)}

    def fleet_pass(self, errors):
        """One update of every device; `errors` by device, or one for all."""
        arrived = []
        for device, task in self.tasks.items():
            error = errors[device] if isinstance(errors, dict) else errors
            metrics = {"error": error} if task.spec.feedback else {}
            delta = torch.zeros(task.params.numel())
            arrived.append(Arrived(device, Update(task.id, delta, 1, metrics)))
        self.tasks |= self.sent(self.server.handle(*arrived))

    @property
    def seed_devices(self):
        return set(self.server.strategy.route.state()["seeds"])

    def error(self, device):
        """The error rate of a device that reviews use."""
        return self.server.strategy.route.state()["members"][device].error


@pytest.mark.parametrize(
    ("every", "passes", "uploads"),
    [
        (1, 1.0, [0, 0, 0, 0]),  # six uploads per fleet pass
        (1, 2.0, [6, 0, 6, 0]),
        (13, 1.0, [6, 12, 0, 6]),  # never after fewer than `every`
        (13, 4.0, [6, 12, 18, 0]),
        (6, 0.0, [0, 0, 0, 0]),
        (12, 0.0, [6, 0, 6, 0]),
    ],
)
def test_reviews_follow_uploads_and_fleet_passes(every, passes, uploads):
    """The number of uploads since the last review, after each fleet pass."""
    fleet, found = Fleet(every=every, passes=passes), []
    for _ in uploads:
        fleet.fleet_pass(0.1)
        found.append(fleet.server.strategy.route.state()["clusters"][MAIN].merges)
    assert found == uploads


def test_the_smallest_of_the_last_three_errors_counts():
    fleet = Fleet()
    for error, seen in ((0.9, math.nan), (0.1, math.nan), (0.8, 0.1), (0.8, 0.1), (0.7, 0.7)):
        fleet.fleet_pass(error)
        assert fleet.error(0) == pytest.approx(seen, nan_ok=True)


def test_a_cluster_that_still_learns_is_not_split():
    fleet, error = Fleet(), 0.9
    for _ in range(12):
        fleet.fleet_pass(dict.fromkeys(range(6), error) | {5: 0.95})
        error *= 0.85
        assert not fleet.seed_devices


def test_a_cluster_that_no_longer_learns_is_split_by_its_largest_error():
    fleet, good = Fleet(), dict.fromkeys(range(6), 0.05)
    for _ in range(8):
        fleet.fleet_pass(good | {4: 0.8, 5: 0.9})
        if fleet.seed_devices:
            break
    assert fleet.seed_devices == {5}


def test_after_a_change_of_the_data_a_cluster_learns_before_it_is_split():
    fleet = Fleet()
    for _ in range(6):
        fleet.fleet_pass(0.1)
    error = 0.9
    for _ in range(8):
        fleet.fleet_pass(error)
        error *= 0.85
        assert not fleet.seed_devices


def test_errors_of_sub_models_are_ignored():
    fleet = Fleet(submodels={5: HALF})
    for _ in range(8):
        fleet.fleet_pass(dict.fromkeys(range(6), 0.05) | {5: 0.9})
        assert not fleet.seed_devices
    assert math.isnan(fleet.error(5))


def test_devices_report_in_every_third_task_and_the_last_error_is_kept():
    fleet = Fleet(feedback_every=3)
    fleet.server.spec = TrainSpec()
    asked = []
    for _ in range(7):
        asked.append(fleet.tasks[0].spec.feedback)
        fleet.fleet_pass(0.3)
    # The first was sent with the spec of the fleet.
    assert asked == [True, False, False, True, False, False, True]
    assert fleet.error(0) == 0.3
    assert fleet.server.lineage_of(0) == MAIN

"""Clusters that form as updates arrive, with numbers worked out by hand."""

import json
import math

import pytest
import torch

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Contribution,
    Failed,
    Joined,
    Left,
    Send,
    Task,
    TrainSpec,
    Update,
)
from latecomer.core.outcomes import Note, Outcome
from latecomer.core.submodel import Submodel
from latecomer.strategies.parts.cluster_merge import ClusterDistances
from latecomer.strategies.parts.cluster_state import ClusterState, MemberState
from latecomer.strategies.parts.clustering import SEED_UPLOADS, STUCK_AFTER, Clustering
from toy import SIZE, toy_server

TWO = {"soft_0": 0.5, "soft_1": 0.5}  # two classes, so that the loss of chance is log 2
MERGED = {"lineage": "cluster-1", "into": MAIN}


def full(value):
    return torch.full((SIZE,), float(value))


class Devices:
    """Devices of an echopfl server; each answers with a model whose values are all the same."""

    def __init__(self, devices, **options):
        self.server = toy_server("echopfl", {"broadcast": "never", "ask": 0, **options})
        self.server.checks.norm_ratio = 0
        self.clustering = self.server.strategy.route
        self.tasks, self.log = {}, []
        self.handle(*(Joined(device) for device in range(devices)))

    def handle(self, *events):
        for command in self.server.handle(*events):
            if isinstance(command, Send):
                self.tasks[command.task.device] = command.task
            elif isinstance(command, Outcome | Note):
                self.log.append((command.kind, command.fields))

    def answer(self, device, at, error=None, choice=0, task=None, **metrics):
        task = task or self.tasks[device]
        if error is not None:
            metrics["error"] = error
        model = full(at) if isinstance(at, float | int) else torch.tensor(at)
        delta = model - task.chosen(choice).params
        self.handle(Arrived(device, Update(task.id, delta, 5, metrics, choice=choice)))

    def round(self, errors, at=0.0):
        """These devices answer once, in order, with these errors."""
        for device, error in errors.items():
            lineage = self.lineage_of(device)
            self.answer(device, at if lineage == MAIN else self.at(lineage), error)

    def at(self, lineage=MAIN):
        """The value of all parameters of a head."""
        head = self.server.store.head_params(lineage)
        assert torch.equal(head, full(head[0]))
        return head[0].item()

    def lineage_of(self, device):
        return self.server.lineage_of(device)

    def offered(self, device):
        return [offer.lineage for offer in self.tasks[device].offers]

    def lines(self, kind):
        return [fields for k, fields in self.log if k == kind]

    def fails(self, device):
        self.handle(Failed(self.tasks[device].id, "lost"))

    def rejoins(self, device):
        self.handle(Joined(device))

    def seeds(self):
        """Device -> the cluster that its next upload starts."""
        return self.clustering.state()["seeds"]

    def clusters(self):
        return self.clustering.state()["clusters"]

    def merging(self):
        """The two clusters that are to be merged."""
        return self.clustering.state()["merging"]

    def losses(self, device):
        """The losses that the device has reported, by lineage."""
        return self.clustering.state()["members"][device].losses


# Seeding and assignment


def test_the_first_uploads_become_the_cluster_models():
    fleet = Devices(3)
    fleet.answer(0, 1.0)
    assert fleet.at(MAIN) == 1.0
    fleet.answer(1, 5.0)
    assert fleet.at("cluster-1") == 5.0
    assert fleet.at(MAIN) == 1.0
    assert [fleet.lineage_of(device) for device in range(2)] == [MAIN, "cluster-1"]
    assert [line["weight"] for line in fleet.lines("arrival")] == [1.0, 1.0]
    assert fleet.lines("split") == [{"lineage": MAIN, "into": "cluster-1", "devices": [1]}]


def test_later_uploads_are_mixed_into_the_nearest_model():
    """Six coordinates at 2: L1 distance 6 to the model at 1, and 18 to the one at 5."""
    fleet = Devices(3)
    fleet.answer(0, 1.0)
    fleet.answer(1, 5.0)
    fleet.answer(2, 2.0)
    assert fleet.lineage_of(2) == MAIN
    weight = 0.6 / math.sqrt(2)  # one commit on the main lineage since it was sent its model
    assert fleet.lines("arrival")[-1]["staleness"] == 1
    assert fleet.at(MAIN) == pytest.approx(1.0 + weight * (2.0 - 1.0))
    assert fleet.at("cluster-1") == 5.0


def test_three_seeds():
    fleet = Devices(4, clusters=3)
    for device, at in enumerate((0.0, 4.0, 9.0)):
        fleet.answer(device, at)
    fleet.answer(3, 8.0)
    assert [fleet.lineage_of(device) for device in range(4)] == [
        MAIN,
        "cluster-1",
        "cluster-2",
        "cluster-2",
    ]


def test_one_cluster_is_not_seeded_but_mixed_from_the_start():
    fleet = Devices(2, clusters=1)
    fleet.answer(0, 1.0)
    assert fleet.at(MAIN) == pytest.approx(0.6)


def contribution(index, model):
    submodel = None if index is None else Submodel("some", torch.tensor(index))
    base = torch.zeros(len(model))
    task = Task(99, 9, 0, MAIN, 0, TrainSpec(), base, submodel)
    update = Update(99, torch.tensor(model), 1)
    return Contribution(task, update, base, update.delta, MAIN, 0)


def test_distances_count_the_covered_coordinates_alone():
    fleet = Devices(2)
    fleet.answer(0, [1.0, 9.0, 9.0, 2.0, 9.0, 9.0])
    fleet.answer(1, [5.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    part = contribution([0, 3], [2.0, 3.5])
    found = fleet.clustering.distances(part, fleet.server)
    assert found == {MAIN: 1.0 + 1.5, "cluster-1": 3.0 + 2.5}
    whole = contribution(None, [2.0, 0.0, 0.0, 3.5, 0.0, 0.0])
    found = fleet.clustering.distances(whole, fleet.server)
    assert found == {MAIN: 2.5 + 4 * 9.0, "cluster-1": 5.5}


def test_a_sub_model_is_assigned_by_the_coordinates_it_covers():
    fleet = Devices(2)
    fleet.answer(0, [1.0, 9.0, 9.0, 2.0, 9.0, 9.0])
    fleet.answer(1, [5.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    fleet.handle(Joined(2, Submodel("some", torch.tensor([0, 3]))))
    fleet.answer(2, [2.0, 3.5])
    assert fleet.lineage_of(2) == MAIN


# Cluster models at 1 and 5; the margin is 0.8.
@pytest.mark.parametrize(
    ("at", "goes"),
    [(3.1, MAIN), (3.3, "cluster-1")],  # 1.9 > 0.8 * 2.1, and 1.7 < 0.8 * 2.3
)
def test_a_device_leaves_only_for_a_clearly_nearer_model(at, goes):
    fleet = Devices(3)
    fleet.answer(0, 1.0)
    fleet.answer(1, 5.0)
    fleet.answer(0, at)
    assert fleet.lineage_of(0) == goes


def test_the_first_upload_of_a_device_needs_no_margin():
    fleet = Devices(3)
    fleet.answer(0, 1.0)
    fleet.answer(1, 5.0)
    fleet.answer(2, 3.1)
    assert fleet.lineage_of(2) == "cluster-1"


def test_staleness_of_a_device_that_moves_is_counted_on_its_new_lineage():
    fleet = Devices(4)
    fleet.answer(0, 1.0)  # version 1
    fleet.answer(1, 5.0)  # version 2, cluster-1
    fleet.answer(2, 5.0)  # version 3, cluster-1
    fleet.answer(0, 5.0)  # was sent version 1; cluster-1 has had two commits since
    assert fleet.lines("arrival")[-1]["lineage"] == "cluster-1"
    assert fleet.lines("arrival")[-1]["staleness"] == 2


def test_a_device_that_joins_late_starts_from_the_main_model():
    fleet = Devices(2)
    fleet.answer(0, 1.0)
    fleet.answer(1, 5.0)
    fleet.handle(Joined(7))
    assert (fleet.tasks[7].lineage, fleet.tasks[7].version) == (MAIN, 1)
    fleet.answer(7, 4.0)
    assert fleet.lineage_of(7) == "cluster-1"


# Offers of all models


def seeded(devices=2, **options):
    """Cluster models at 0 and 8; device 1 is in the latter cluster."""
    fleet = Devices(devices, **options)
    fleet.answer(0, 0.0, error=0.1)
    fleet.answer(1, 8.0, error=0.1)
    return fleet


def test_a_device_is_offered_all_models_at_every_nth_upload():
    fleet, offered_after = seeded(2, ask=3), []
    for upload in range(2, 11):
        losses = {"loss_0": 1.0, "loss_1": 2.0} if fleet.offered(0) else {}
        fleet.answer(0, 0.0, **losses)
        if fleet.offered(0):
            offered_after.append(upload)
    assert offered_after == [3, 6, 9]


def test_every_open_cluster_is_offered():
    fleet = seeded(2, ask=1)
    assert fleet.tasks[1].lineage == "cluster-1"
    assert fleet.offered(1) == [MAIN]


def test_with_ask_0_no_device_is_offered_other_models():
    fleet = seeded(2, ask=0)
    for _ in range(20):
        fleet.answer(0, 0.0, error=1.0)
        assert not fleet.offered(0)


def test_devices_with_high_errors_are_offered_all_models_sooner():
    """The median error is 0.1: above 0.2 is high. The second upload is the earliest."""
    fleet = seeded(5, ask=1000, every=5, max_ratio=1.0)
    fleet.round({2: 0.1, 3: 0.2, 4: 0.21})
    fleet.round(dict.fromkeys((0, 1, 2, 3), 0.1) | {3: 0.2, 4: 0.21})
    assert [bool(fleet.offered(device)) for device in range(5)] == [False] * 4 + [True]


def test_a_device_moves_to_the_cluster_of_least_loss():
    fleet = seeded(2, ask=1)
    fleet.answer(1, 0.0, choice=1, loss_0=2.0, loss_1=0.5)
    assert fleet.lineage_of(1) == MAIN
    assert fleet.losses(1) == {"cluster-1": 2.0, MAIN: 0.5}


def test_a_device_that_reports_no_losses_gets_no_further_offer():
    """A private device reports nothing about its data."""
    fleet = seeded(2, ask=1)
    assert fleet.offered(1)
    for _ in range(10):
        fleet.answer(1, 8.0)
        assert not fleet.offered(1)


def test_a_lost_offer_is_repeated():
    fleet = seeded(2, ask=2)
    fleet.answer(1, 8.0)
    assert fleet.offered(1)
    fleet.fails(1)
    fleet.rejoins(1)
    fleet.answer(1, 8.0, error=0.1)
    fleet.answer(1, 8.0, error=0.1)
    assert fleet.offered(1)


def test_an_upload_of_an_older_task_does_not_answer_the_offer():
    """A device may work on several tasks at once."""
    fleet = Devices(2, ask=1)
    first = fleet.tasks[1]
    fleet.rejoins(1)
    second = fleet.tasks[1]
    fleet.answer(0, 0.0)
    fleet.answer(1, 8.0, task=first)
    fleet.rejoins(1)
    offer = fleet.tasks[1]
    assert offer.offers
    fleet.answer(1, 8.0, error=0.1, task=second)
    fleet.rejoins(1)
    assert not fleet.offered(1)  # the first offer has not been answered yet
    fleet.answer(1, 8.0, error=0.1, task=offer, loss_0=0.5, loss_1=3.0)
    assert fleet.losses(1) == {"cluster-1": 0.5, MAIN: 3.0}


def test_a_cluster_that_is_not_open_is_not_offered():
    """The only other cluster is not open yet; once it is, devices are offered it."""
    fleet = splitting(ask=1)
    fleet.answer(4, 7.0, 0.1)
    assert "cluster-1" in fleet.server.store
    for _ in range(2):
        fleet.round(dict.fromkeys(range(4), 0.1))
        assert not any(fleet.offered(device) for device in range(4))
    seed_uploads(fleet, SEED_UPLOADS)
    fleet.round(dict.fromkeys(range(4), 0.1))
    assert all(fleet.offered(device) == ["cluster-1"] for device in range(4))


# Seed devices and splits

HIGH = dict.fromkeys(range(4), 0.1) | {4: 0.9}


def splitting(**options):
    """One cluster of five devices, the last with a high error, after its first review."""
    fleet = Devices(5, **{"clusters": 1, "max_ratio": 4.0, "every": 5, **options})
    fleet.round(HIGH)
    return fleet


def test_the_device_with_the_largest_error_seeds_a_cluster_with_its_model():
    fleet = splitting()
    assert fleet.seeds() == {4: "cluster-1"}
    assert "cluster-1" not in fleet.server.store
    fleet.answer(3, 0.0, 0.1)
    fleet.answer(4, 7.0, 0.9)
    assert fleet.at("cluster-1") == 7.0
    assert fleet.at(MAIN) == 0.0
    assert fleet.lineage_of(4) == "cluster-1"
    assert fleet.lines("split") == [{"lineage": MAIN, "into": "cluster-1", "devices": [4]}]
    assert fleet.lines("arrival")[-1]["weight"] == 1.0
    fleet.answer(4, 8.0, 0.9)
    assert fleet.at("cluster-1") == pytest.approx(7.6)  # the usual weight of 0.6


@pytest.mark.parametrize(("error", "splits"), [(0.2, False), (0.21, True)])
def test_the_gap_rule(error, splits):
    """Worse than the median of 0.1 by a factor of 1 + gap, which is 2."""
    fleet = Devices(5, clusters=1, max_ratio=4.0, every=5)
    fleet.round(HIGH | {4: error})
    assert bool(fleet.seeds()) is splits


def test_outliers_below_the_needed_error_stay():
    fleet = Devices(5, clusters=1, max_ratio=4.0, every=5, need=0.5)
    fleet.round(HIGH | {4: 0.45})
    assert not fleet.seeds()


def test_a_fifth_must_have_high_errors():
    """Of six devices a fifth, rounded up, is two: one alone does not count."""
    fleet = Devices(6, clusters=1, max_ratio=4.0, every=6)
    fleet.round(dict.fromkeys(range(5), 0.1) | {5: 0.9})
    assert not fleet.seeds()
    fleet.round(dict.fromkeys(range(4), 0.1) | {4: 0.8, 5: 0.9})
    assert fleet.seeds() == {5: "cluster-1"}


def test_a_small_cluster_is_not_split():
    fleet = Devices(3, clusters=1, max_ratio=4.0, every=3)
    fleet.round({0: 0.1, 1: 0.1, 2: 0.9})
    assert not fleet.seeds()


def test_a_cluster_that_no_longer_learns_is_split_though_all_errors_are_equal():
    fleet = Devices(5, clusters=1, max_ratio=4.0, every=5)
    for _ in range(STUCK_AFTER):
        fleet.round(dict.fromkeys(range(5), 0.5))
        assert not fleet.seeds()
    fleet.round(dict.fromkeys(range(5), 0.5))
    assert fleet.seeds()


def test_a_cluster_that_still_learns_is_not_split():
    fleet = Devices(5, clusters=1, max_ratio=4.0, every=5)
    for period in range(6):
        fleet.round(dict.fromkeys(range(5), 0.9 * 0.8**period))
        assert not fleet.seeds()


def test_a_review_follows_a_fixed_number_of_uploads():
    fleet = Devices(5, clusters=1, max_ratio=4.0, every=7)
    fleet.round(HIGH)
    fleet.answer(0, 0.0, 0.1)
    assert not fleet.seeds()
    fleet.answer(1, 0.0, 0.1)
    assert fleet.seeds()


def reviewed(fleet, errors):
    """The devices of the main cluster answer in order until it is reviewed; the seed devices."""
    while True:
        for device in [d for d in errors if fleet.lineage_of(d) == MAIN]:
            fleet.answer(device, 0.0, errors[device])
            if fleet.clusters()[MAIN].merges == 0:
                return fleet.seeds()


def test_a_cluster_pauses_after_a_split_and_longer_each_time():
    """The worst of four with high errors at a time, after pauses of 1 and 2 reviews."""
    fleet = Devices(10, clusters=1, max_ratio=9.0, every=10)
    errors = dict.fromkeys(range(6), 0.1) | {6: 0.6, 7: 0.7, 8: 0.8, 9: 0.9}
    found = []
    for _ in range(6):
        seeds = reviewed(fleet, errors)
        found.append(list(seeds))
        for device in seeds:
            fleet.answer(device, 10.0 * device, 0.1)
    assert found == [[9], [], [8], [], [], [7]]


def test_there_are_never_more_clusters_than_allowed():
    fleet = Devices(10, clusters=2, max_ratio=1.5, every=5)
    fleet.answer(0, 0.0, 0.1)
    fleet.answer(1, 50.0, 0.1)
    errors = dict.fromkeys(range(7), 0.1) | {7: 0.9, 8: 0.9, 9: 0.9}
    for period in range(30):
        fleet.round(errors)
        for device in list(fleet.seeds()):
            fleet.answer(device, 100.0 + 10 * period, 0.9)
        assert len({fleet.lineage_of(device) for device in range(10)}) <= 3
    assert any(line["into"] == "cluster-2" for line in fleet.lines("split"))


@pytest.mark.parametrize(("max_ratio", "cap"), [(1.0, 2), (1.7, 3), (2.0, 4)])
def test_the_largest_number_of_clusters_is_whole(max_ratio, cap):
    assert Devices(1, clusters=2, max_ratio=max_ratio).clustering.max_clusters == cap


def test_with_one_cluster_at_most_devices_report_nothing():
    assert not Devices(1, clusters=1, max_ratio=1.0).tasks[0].spec.feedback
    assert Devices(1, clusters=1, max_ratio=2.0).tasks[0].spec.feedback


def test_a_lost_seed_device_makes_room_for_another():
    fleet = splitting(max_ratio=2.0)
    fleet.fails(4)
    errors = dict.fromkeys(range(3), 0.1) | {3: 0.9}
    assert reviewed(fleet, errors) == {}
    assert reviewed(fleet, errors) == {3: "cluster-2"}
    assert set(fleet.clusters()) == {MAIN, "cluster-2"}


def test_an_absent_device_seeds_nothing():
    fleet = Devices(6, clusters=1, max_ratio=4.0, every=6)
    fleet.round({5: 0.9, 0: 0.1, 1: 0.1, 2: 0.1})
    fleet.fails(5)
    fleet.handle(Left(5))
    fleet.round({3: 0.1, 4: 0.1})
    assert not fleet.seeds()


# Opening and closing


def seed_uploads(fleet, times):
    for _ in range(times):
        fleet.answer(4, 7.0, 0.1)


def test_a_trained_cluster_is_offered_to_devices_with_high_errors():
    fleet = splitting(ask=1000)
    seed_uploads(fleet, SEED_UPLOADS - 1)
    fleet.round({0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1})
    assert not any(fleet.offered(device) for device in range(4))
    seed_uploads(fleet, 1)
    fleet.round({0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1})
    assert [bool(fleet.offered(device)) for device in range(4)] == [False, True, False, False]
    assert fleet.offered(1) == ["cluster-1"]


@pytest.mark.parametrize("partial", [False, True])
def test_a_new_cluster_trains_its_output_layer_alone_until_it_is_open(partial):
    fleet = splitting(partial=partial)
    assert not fleet.tasks[4].spec.last_layer_only
    fleet.answer(4, 7.0, 0.1)
    for _ in range(SEED_UPLOADS - 1):
        assert fleet.tasks[4].spec.last_layer_only is partial
        assert not fleet.tasks[0].spec.last_layer_only
        seed_uploads(fleet, 1)
    assert not fleet.tasks[4].spec.last_layer_only


def test_a_seed_device_that_stays_alone_returns():
    fleet = splitting(need=0.5)
    seed_uploads(fleet, 2 * SEED_UPLOADS - 1)
    reviewed(fleet, dict.fromkeys(range(4), 0.1))
    assert not fleet.lines("merge")
    seed_uploads(fleet, 1)
    reviewed(fleet, dict.fromkeys(range(4), 0.1))
    assert fleet.lines("merge") == [{**MERGED, "reason": "no device joined its seed device"}]
    assert fleet.lineage_of(4) == MAIN
    assert fleet.at(MAIN) == 0.0  # the closed model is discarded
    assert "cluster-1" not in fleet.clusters()


def test_a_cluster_of_two_devices_stays():
    fleet = splitting(ask=1000)
    seed_uploads(fleet, SEED_UPLOADS)
    fleet.round({3: 0.3})
    fleet.answer(3, 7.0, 0.1, choice=1, loss_0=2.0, loss_1=0.1)
    assert fleet.lineage_of(3) == "cluster-1"
    seed_uploads(fleet, SEED_UPLOADS)
    fleet.round(dict.fromkeys(range(3), 0.1))
    fleet.round(dict.fromkeys(range(3), 0.1))
    assert fleet.lineage_of(3) == fleet.lineage_of(4) == "cluster-1"
    assert not fleet.lines("merge")


def test_a_cluster_without_devices_is_closed():
    fleet = seeded(3, every=4)
    fleet.answer(1, 0.0, 0.1)
    assert fleet.lineage_of(1) == MAIN
    fleet.round(dict.fromkeys(range(3), 0.1))
    assert fleet.lines("merge") == [{**MERGED, "reason": "it has no devices"}]
    assert fleet.server.store.lineages == (MAIN,)


def test_an_update_of_a_closed_cluster_goes_to_the_one_that_absorbed_it():
    fleet = seeded(3, every=4)
    late = fleet.tasks[1]
    fleet.rejoins(1)
    fleet.answer(1, 0.0, 0.1)
    fleet.round(dict.fromkeys(range(3), 0.1))
    assert "cluster-1" not in fleet.server.store
    before = fleet.server.store.staleness(late.version, MAIN)
    fleet.answer(1, 0.0, 0.1, task=late)
    line = fleet.lines("arrival")[-1]
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, late.version, before)


def test_the_main_lineage_may_be_absorbed():
    """A cluster without devices then goes to the one that absorbed it."""
    fleet = seeded(3, every=2)
    fleet.server.fork(MAIN, "cluster-9")
    fleet.server.absorb("cluster-1", MAIN)
    fleet.answer(2, 8.0, 0.1)
    fleet.answer(1, 8.0, 0.1)
    assert fleet.server.store.lineages == ("cluster-1",)
    fleet.handle(Joined(7))
    assert fleet.tasks[7].lineage == "cluster-1"


# Merges


def similar(extra=0.1, error=0.1, **options):
    """Devices 0 and 2 at 0, and device 1 at 8, whose loss on their model is larger by `extra`."""
    fleet = Devices(3, **{"ask": 2, "every": 3, "gap": 100.0, **options})
    fleet.answer(0, 0.0, error, **TWO)
    fleet.answer(1, 8.0, error, **TWO)
    fleet.answer(2, 0.0, error, **TWO)
    fleet.answer(1, 8.0, error, **TWO)
    assert fleet.offered(1) == [MAIN]
    fleet.answer(1, 8.0, error, **TWO, loss_0=1.0, loss_1=1.0 + extra)
    return fleet


def test_two_similar_clusters_are_merged_by_algorithm_1():
    fleet = similar()
    assert fleet.merging() == (MAIN, "cluster-1")
    assert not fleet.lines("merge")  # an update of the main cluster is needed for the direction
    fleet.answer(1, 8.0, 0.1, **TWO)
    assert not fleet.lines("merge")
    fleet.answer(0, [1.0, 2.0, 0.0, 0.0, -1.0, 0.0], 0.1, **TWO)
    assert fleet.lines("merge") == [{**MERGED, "reason": "the two closest clusters"}]
    # The upload is merged first, one commit late: then (8 - head) * delta, in units of its maximum.
    a = 0.6 / math.sqrt(2)
    head = [a, 2 * a, 0.0, 0.0, -a, 0.0]
    top = (8 - 2 * a) * 2
    alpha = [(8 - a) / top, 1.0, 0.0, 0.0, 0.0, 0.0]
    expected = [share * 8 + (1 - share) * h for share, h in zip(alpha, head, strict=True)]
    assert fleet.server.store.head_params(MAIN).tolist() == pytest.approx(expected, rel=1e-5)
    assert {fleet.lineage_of(device) for device in range(3)} == {MAIN}


def test_clusters_with_a_large_extra_loss_stay_apart():
    """0.25 of the loss of chance, which is log 2 for two classes."""
    assert similar(extra=0.17).merging() is not None
    assert similar(extra=0.18).merging() is None


def test_a_cluster_with_a_high_error_is_not_merged():
    assert similar(error=0.3, max_ratio=1.0).merging() is None


def test_a_merge_is_cancelled_when_one_cluster_is_closed():
    fleet = similar()
    fleet.server.absorb(MAIN, "cluster-1")
    assert fleet.merging() is None
    fleet.answer(0, 0.0, 0.1)
    assert not fleet.lines("merge")


def test_too_many_clusters_are_merged_by_their_mean_predictions():
    """Three clusters where two are allowed; those of devices 1 and 2 predict the same."""
    fleet = Devices(3, clusters=3, every=1)
    fleet.clustering.max_clusters = 2
    same = {"soft_0": 0.9, "soft_1": 0.1}
    fleet.answer(0, 0.0, 0.1, soft_0=0.1, soft_1=0.9)
    fleet.answer(1, 8.0, 0.1, **same)
    fleet.answer(2, 30.0, 0.1, **same)
    assert set(fleet.merging()) == {"cluster-1", "cluster-2"}


def test_a_main_lineage_without_devices_does_not_count():
    fleet = seeded(3, every=1, max_ratio=1.0)
    fleet.answer(0, 8.0, 0.1)
    fleet.server.fork("cluster-1", "cluster-2")
    fleet.server.store.commit("cluster-2", full(16))
    fleet.answer(2, 16.0, 0.1)
    assert [fleet.lineage_of(d) for d in range(3)] == ["cluster-1", "cluster-1", "cluster-2"]
    assert fleet.merging() is None


# Hostile devices

WRONG = [
    {"error": 1e300, "feedback": 1e300},
    {"error": -1e300},
    {"error": 0.1, "soft_0": 1.0},
    {"error": 0.1, "soft_0": 0.2, "soft_1": 0.3, "soft_2": 0.5},
    {"error": 0.1, "soft_0": -1e300, "soft_1": 1e300},
    {"error": 0.1, "soft_0": 0, "soft_1": 0},
    {"error": 0.1, "soft_1": 1.0},
    {"error": 0.1, "loss_0": 0.0},
    {"error": 0.1, "loss_0": -1e300, "loss_1": 1e300},
    {"error": 0.1, **{f"soft_{j}": 1e-3 for j in range(1000)}},
    {},
]


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_wrong_reports_do_no_harm_to_other_devices(wrong):
    fleet = Devices(6, ask=1, every=1)
    for period in range(12):
        for device in range(6):
            at = 8.0 * (device % 2)
            right = {"error": 0.1, "soft_0": 0.5, "soft_1": 0.5}
            if fleet.offered(device):
                here = fleet.tasks[device].lineage == (MAIN if at == 0 else "cluster-1")
                right |= {"loss_0": 0.1 if here else 3.0, "loss_1": 3.0 if here else 0.1}
            # Also the device that uploads first reports wrong values.
            fleet.answer(device, at, **(wrong if device in (0, 3) and period != 5 else right))
    assert not fleet.lines("refusal")
    first, second, third, last = (fleet.lineage_of(device) for device in (1, 2, 4, 5))
    assert first == last != second == third
    state = fleet.server.state()
    json.dumps(encode(state)[0], allow_nan=False)


def test_one_wrong_report_cannot_decide_for_a_cluster():
    """Two devices have four times the loss of chance, one claims an unbounded gain."""
    losses = {"cluster-1": 0.0, MAIN: 50.0}
    members = {
        1: MemberState(mean_prediction=torch.tensor([0.5, 0.5]), losses=losses),
        2: MemberState(mean_prediction=torch.tensor([0.5, 0.5]), losses=losses),
        3: MemberState(
            mean_prediction=torch.tensor([0.5, 0.5]), losses={"cluster-1": 1e300, MAIN: 0.0}
        ),
    }
    distances = ClusterDistances(members, {"cluster-1": [1, 2, 3]}, seeded(4).server)
    assert distances.extra_loss("cluster-1", MAIN) == pytest.approx((4 + 4 - 4) / 3)


# Forks, absorbed lineages and checkpoints


def with_clusters(**changes):
    """A clustering with changed entries of its state."""
    clustering = Clustering()
    clustering.restore({**clustering.state(), **changes})
    return clustering


def test_a_fork_opens_a_cluster_and_keeps_a_seeded_one():
    clustering = with_clusters(clusters={"cluster-6": ClusterState(seed_device=3, open=False)})
    clustering.on_fork(MAIN, "cluster-5")
    clustering.on_fork(MAIN, "cluster-6")
    clusters = clustering.state()["clusters"]
    assert clusters["cluster-5"].open
    assert (clusters["cluster-6"].seed_device, clusters["cluster-6"].open) == (3, False)


def test_an_absorbing_cluster_starts_its_error_record_again():
    clustering = with_clusters(
        clusters={MAIN: ClusterState(best=0.1, stuck=2, rest=4), "cluster-1": ClusterState()},
        merging=(MAIN, "cluster-2"),
    )
    clustering.on_absorb(MAIN, "cluster-1")
    state = clustering.state()
    assert state["clusters"] == {MAIN: ClusterState(best=math.inf, stuck=0, rest=4)}
    assert state["merging"] == (MAIN, "cluster-2")


def full_state():
    """Devices with an offer, losses, mean predictions, one without reports, seeds and a merge."""
    fleet = similar()
    fleet.handle(Joined(3))
    fleet.answer(3, 0.0)
    state = fleet.clustering.state()
    state["seeds"] = {2: "cluster-7"}
    state["clusters"]["cluster-7"] = ClusterState(seed_device=2, seeded_at=1, open=False)
    state["direction"] = full(1)
    fleet.clustering.restore(state)
    return fleet


def through_a_file(state):
    tree, tensors = encode(state)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), storable(tensors))


def test_its_state_survives_a_file():
    clustering, twin = full_state().clustering, Clustering()
    twin.restore(through_a_file(clustering.state()))
    ours, theirs = encode(clustering.state()), encode(twin.state())
    assert json.dumps(ours[0]) == json.dumps(theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    assert all(torch.equal(ours[1][name], theirs[1][name]) for name in ours[1])
    members = twin.state()["members"]
    assert math.isnan(members[3].error)
    assert members[1].losses


def test_its_state_is_a_copy():
    fleet = full_state()
    kept = fleet.clustering.state()
    before = json.dumps(encode(kept)[0])
    fleet.answer(1, 8.0, 0.9, **TWO)
    fleet.answer(0, 0.0, 0.9, **TWO)
    assert json.dumps(encode(kept)[0]) == before


def test_an_offer_survives_a_checkpoint():
    fleet = seeded(2, ask=2)
    fleet.answer(1, 8.0)
    twin = Devices(0, ask=2)
    twin.server.restore(through_a_file(fleet.server.state()))
    task = twin.server.open_tasks[fleet.tasks[1].id]
    twin.answer(1, 8.0, task=task, loss_0=0.25, loss_1=1.5)
    assert twin.losses(1) == {"cluster-1": 0.25, MAIN: 1.5}

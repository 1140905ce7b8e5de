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
    Note,
    Send,
    Task,
    TrainSpec,
    Update,
)
from latecomer.core.submodel import Submodel
from latecomer.strategies.parts.cluster_distance import ClusterDistances
from latecomer.strategies.parts.cluster_state import ClusterState
from latecomer.strategies.parts.clustering import SEED_UPLOADS, STUCK_AFTER, Clustering
from toy import SIZE, toy_server

TWO = {"soft_0": 0.5, "soft_1": 0.5}  # of two classes, so that the loss of chance is log 2

MERGED = {"lineage": "cluster-1", "into": MAIN}


def full(value):
    return torch.full((SIZE,), float(value))


class Party:
    """Devices that answer when they are told to, with a model of which all values are the same."""

    def __init__(self, devices, **options):
        self.server = toy_server("echopfl", {"broadcast": "never", "ask": 0, **options})
        self.server.checks.norm_ratio = 0
        self.branches = self.server.strategy.route
        self.tasks, self.notes = {}, []
        self.hear(*(Joined(device) for device in range(devices)))

    def hear(self, *events):
        for command in self.server.handle(*events):
            if isinstance(command, Send):
                self.tasks[command.task.device] = command.task
            elif isinstance(command, Note):
                self.notes.append((command.kind, command.fields))

    def answer(self, device, at, error=None, choice=0, task=None, **metrics):
        task = task or self.tasks[device]
        if error is not None:
            metrics["error"] = error
        model = full(at) if isinstance(at, float | int) else torch.tensor(at)
        delta = model - task.chosen(choice).params
        self.hear(Arrived(device, Update(task.id, delta, 5, metrics, choice=choice)))

    def round(self, errors, at=0.0):
        """Everybody answers once, in order; `errors` is theirs."""
        for device, error in errors.items():
            home = self.server.lineage_of(device)
            self.answer(device, at if home == MAIN else self.at(home), error)

    def at(self, lineage=MAIN):
        """Where all values of a head are."""
        head = self.server.store.head_params(lineage)
        assert torch.equal(head, full(head[0]))
        return head[0].item()

    def home(self, device):
        return self.server.lineage_of(device)

    def offered(self, device):
        return [offer.lineage for offer in self.tasks[device].offers]

    def lines(self, kind):
        return [fields for k, fields in self.notes if k == kind]

    def dies(self, device):
        self.hear(Failed(self.tasks[device].id, "lost"))

    def comes_back(self, device):
        self.hear(Joined(device))


# Seeding and assignment


def test_the_first_uploads_are_the_centres_as_they_are():
    party = Party(3)
    party.answer(0, 1.0)
    assert party.at(MAIN) == 1.0
    party.answer(1, 5.0)
    assert party.at("cluster-1") == 5.0
    assert party.at(MAIN) == 1.0
    assert [party.lineage_of(device) for device in range(2)] == [MAIN, "cluster-1"]
    assert [line["weight"] for line in party.lines("arrival")] == [1.0, 1.0]
    assert party.lines("split") == [{"lineage": MAIN, "into": "cluster-1", "devices": [1]}]


def test_later_uploads_are_mixed_into_the_nearest_centre():
    """From 0 to 2: six coordinates, 6 from the centre at 1 and 18 from the one at 5."""
    party = Party(3)
    party.answer(0, 1.0)
    party.answer(1, 5.0)
    party.answer(2, 2.0)
    assert party.lineage_of(2) == MAIN
    weight = 0.6 / math.sqrt(2)  # one commit on the main lineage since it was sent its model
    assert party.lines("arrival")[-1]["staleness"] == 1
    assert party.at(MAIN) == pytest.approx(1.0 + weight * (2.0 - 1.0))
    assert party.at("cluster-1") == 5.0


def test_three_seeds():
    party = Party(4, clusters=3)
    for device, at in enumerate((0.0, 4.0, 9.0)):
        party.answer(device, at)
    party.answer(3, 8.0)
    assert [party.lineage_of(device) for device in range(4)] == [
        MAIN,
        "cluster-1",
        "cluster-2",
        "cluster-2",
    ]


def test_one_cluster_is_not_seeded_but_mixed_from_the_start():
    party = Party(2, clusters=1)
    party.answer(0, 1.0)
    assert party.at(MAIN) == pytest.approx(0.6)


def contribution(index, model):
    submodel = None if index is None else Submodel("some", torch.tensor(index))
    base = torch.zeros(len(model))
    task = Task(99, 9, 0, MAIN, 0, TrainSpec(), base, submodel)
    update = Update(99, torch.tensor(model), 1)
    return Contribution(task, update, base, update.delta, MAIN, 0)


def test_distances_count_the_covered_coordinates_alone():
    party = Party(2)
    party.answer(0, [1.0, 9.0, 9.0, 2.0, 9.0, 9.0])
    party.answer(1, [5.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    part = contribution([0, 3], [2.0, 3.5])
    found = party.branches.distances(part, party.server)
    assert found == {MAIN: 1.0 + 1.5, "cluster-1": 3.0 + 2.5}
    whole = contribution(None, [2.0, 0.0, 0.0, 3.5, 0.0, 0.0])
    found = party.branches.distances(whole, party.server)
    assert found == {MAIN: 2.5 + 4 * 9.0, "cluster-1": 5.5}


def test_a_device_with_a_sub_model_joins_by_what_it_covers():
    party = Party(2)
    party.answer(0, [1.0, 9.0, 9.0, 2.0, 9.0, 9.0])
    party.answer(1, [5.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    party.hear(Joined(2, Submodel("some", torch.tensor([0, 3]))))
    party.answer(2, [2.0, 3.5])
    assert party.lineage_of(2) == MAIN


# Centres at 1 and 5; the margin is 0.8.
@pytest.mark.parametrize(
    ("at", "goes"),
    [(3.1, MAIN), (3.3, "cluster-1")],  # 1.9 > 0.8 * 2.1, and 1.7 < 0.8 * 2.3
)
def test_a_device_leaves_only_for_a_clearly_nearer_centre(at, goes):
    party = Party(3)
    party.answer(0, 1.0)
    party.answer(1, 5.0)
    party.answer(0, at)
    assert party.lineage_of(0) == goes


def test_the_first_upload_of_a_device_needs_no_margin():
    party = Party(3)
    party.answer(0, 1.0)
    party.answer(1, 5.0)
    party.answer(2, 3.1)
    assert party.lineage_of(2) == "cluster-1"


def test_staleness_of_one_who_moves_is_counted_where_it_goes():
    party = Party(4)
    party.answer(0, 1.0)  # version 1
    party.answer(1, 5.0)  # version 2, cluster-1
    party.answer(2, 5.0)  # version 3, cluster-1
    party.answer(0, 5.0)  # was sent version 1; cluster-1 has had two commits since
    assert party.lines("arrival")[-1]["lineage"] == "cluster-1"
    assert party.lines("arrival")[-1]["staleness"] == 2


def test_one_who_joins_late_begins_with_the_main_model_and_goes_where_it_belongs():
    party = Party(2)
    party.answer(0, 1.0)
    party.answer(1, 5.0)
    party.hear(Joined(7))
    assert (party.tasks[7].lineage, party.tasks[7].version) == (MAIN, 1)
    party.answer(7, 4.0)
    assert party.lineage_of(7) == "cluster-1"


# Questions


def seeded(devices=2, **options):
    """Centres at 0 and 8; device 1 is at the latter."""
    party = Party(devices, **options)
    party.answer(0, 0.0, error=0.1)
    party.answer(1, 8.0, error=0.1)
    return party


def test_every_nth_upload_a_device_is_asked_where_it_belongs():
    party, asked = seeded(2, ask=3), []
    for upload in range(2, 11):
        known = {"loss_0": 1.0, "loss_1": 2.0} if party.offered(0) else {}
        party.answer(0, 0.0, **known)
        if party.offered(0):
            asked.append(upload)
    assert asked == [3, 6, 9]


def test_the_question_holds_every_open_centre():
    party = seeded(2, ask=1)
    assert party.tasks[1].lineage == "cluster-1"
    assert party.offered(1) == [MAIN]


def test_ask_0_asks_nobody():
    party = seeded(2, ask=0)
    for _ in range(20):
        party.answer(0, 0.0, error=1.0)
        assert not party.offered(0)


def test_the_badly_served_are_asked_sooner():
    """The median error is 0.1: above 0.2 is bad. The second upload is the earliest."""
    party = seeded(5, ask=1000, every=5, most=1.0)
    party.round({2: 0.1, 3: 0.2, 4: 0.21})
    party.round(dict.fromkeys((0, 1, 2, 3), 0.1) | {3: 0.2, 4: 0.21})
    assert [bool(party.offered(device)) for device in range(5)] == [False] * 4 + [True]


def test_a_device_goes_where_it_fits_best():
    party = seeded(2, ask=1)
    party.answer(1, 0.0, choice=1, loss_0=2.0, loss_1=0.5)
    assert party.lineage_of(1) == MAIN
    assert party.branches._members[1].fits == {"cluster-1": 2.0, MAIN: 0.5}


def test_one_who_does_not_answer_is_not_asked_again():
    """A private device tells nothing of its data."""
    party = seeded(2, ask=1)
    assert party.offered(1)
    for _ in range(10):
        party.answer(1, 8.0)
        assert not party.offered(1)


def test_a_question_that_is_lost_is_asked_again():
    party = seeded(2, ask=2)
    party.answer(1, 8.0)
    assert party.offered(1)
    party.dies(1)
    party.comes_back(1)
    party.answer(1, 8.0, error=0.1)
    party.answer(1, 8.0, error=0.1)
    assert party.offered(1)


def test_uploads_that_were_under_way_are_no_answer():
    """A device that is late in flight works on several tasks at once."""
    party = Party(2, ask=1)
    first = party.tasks[1]
    party.comes_back(1)
    second = party.tasks[1]
    party.answer(0, 0.0)
    party.answer(1, 8.0, task=first)
    party.comes_back(1)
    question = party.tasks[1]
    assert question.offers
    party.answer(1, 8.0, error=0.1, task=second)
    assert party.branches._members[1].answers
    party.comes_back(1)
    assert not party.offered(1)  # the answer is still under way
    party.answer(1, 8.0, error=0.1, task=question, loss_0=0.5, loss_1=3.0)
    assert party.branches._members[1].fits == {"cluster-1": 0.5, MAIN: 3.0}


def test_where_there_is_nothing_to_choose_from_nobody_is_asked():
    """The only other cluster is not open yet; once it is, the device must be asked."""
    party = founded(ask=1)
    party.answer(4, 7.0, 0.1)
    assert "cluster-1" in party.server.store
    for _ in range(2):
        party.round(dict.fromkeys(range(4), 0.1))
        assert not any(party.offered(device) for device in range(4))
    assert all(member.answers for member in party.branches._members.values())


# Founders

BAD = dict.fromkeys(range(4), 0.1) | {4: 0.9}


def founded(**options):
    """One cluster of five devices, of which the last is badly served, after its refinement."""
    party = Party(5, **{"clusters": 1, "most": 4.0, "every": 5, **options})
    party.round(BAD)
    return party


def test_the_worst_founds_a_new_cluster_with_its_own_model():
    party = founded()
    assert party.branches._founders == {4: "cluster-1"}
    assert "cluster-1" not in party.server.store
    party.answer(3, 0.0, 0.1)
    party.answer(4, 7.0, 0.9)
    assert party.at("cluster-1") == 7.0
    assert party.at(MAIN) == 0.0
    assert party.lineage_of(4) == "cluster-1"
    assert party.lines("split") == [{"lineage": MAIN, "into": "cluster-1", "devices": [4]}]
    assert party.lines("arrival")[-1]["weight"] == 1.0
    party.answer(4, 8.0, 0.9)
    assert party.at("cluster-1") == pytest.approx(7.6)  # 0.6 like everybody's


@pytest.mark.parametrize(("error", "founds"), [(0.2, False), (0.21, True)])
def test_the_gap_rule(error, founds):
    """Worse than the median of 0.1 by a factor of 1 + gap, which is 2."""
    party = Party(5, clusters=1, most=4.0, every=5)
    party.round(BAD | {4: error})
    assert bool(party.branches._founders) is founds


def test_outliers_of_a_cluster_that_is_good_enough_stay():
    party = Party(5, clusters=1, most=4.0, every=5, need=0.5)
    party.round(BAD | {4: 0.45})
    assert not party.branches._founders


def test_a_fifth_must_be_badly_served():
    """Of six devices a fifth, rounded up, is two: one alone does not count."""
    party = Party(6, clusters=1, most=4.0, every=6)
    party.round(dict.fromkeys(range(5), 0.1) | {5: 0.9})
    assert not party.branches._founders
    party.round(dict.fromkeys(range(4), 0.1) | {4: 0.8, 5: 0.9})
    assert party.branches._founders == {5: "cluster-1"}


def test_a_small_cluster_is_not_divided():
    party = Party(3, clusters=1, most=4.0, every=3)
    party.round({0: 0.1, 1: 0.1, 2: 0.9})
    assert not party.branches._founders


def test_a_cluster_that_stays_bad_is_divided_though_all_are_equal():
    party = Party(5, clusters=1, most=4.0, every=5)
    for _ in range(STUCK_AFTER):
        party.round(dict.fromkeys(range(5), 0.5))
        assert not party.branches._founders
    party.round(dict.fromkeys(range(5), 0.5))
    assert party.branches._founders


def test_a_cluster_that_gets_better_is_not_divided():
    party = Party(5, clusters=1, most=4.0, every=5)
    for turn in range(6):
        party.round(dict.fromkeys(range(5), 0.9 * 0.8**turn))
        assert not party.branches._founders


def test_refinement_comes_every_so_many_merges():
    party = Party(5, clusters=1, most=4.0, every=7)
    party.round(BAD)
    party.answer(0, 0.0, 0.1)
    assert not party.branches._founders
    party.answer(1, 0.0, 0.1)
    assert party.branches._founders


def refined(party, errors):
    """The devices of the main cluster answer in turn until it is refined."""
    while True:
        for device in [d for d in errors if party.lineage_of(d) == MAIN]:
            party.answer(device, 0.0, errors[device])
            if party.branches._clusters[MAIN].merges == 0:
                return dict(party.branches._founders)


def test_a_cluster_rests_after_it_was_divided_and_longer_each_time():
    """The worst of four badly served at a time, with rests of 1 and 2 refinements between."""
    party = Party(10, clusters=1, most=9.0, every=10)
    errors = dict.fromkeys(range(6), 0.1) | {6: 0.6, 7: 0.7, 8: 0.8, 9: 0.9}
    found = []
    for _ in range(6):
        founders = refined(party, errors)
        found.append(list(founders))
        for device in founders:
            party.answer(device, 10.0 * device, 0.1)
    assert found == [[9], [], [8], [], [], [7]]


def test_there_are_never_more_than_most_times_clusters():
    party = Party(10, clusters=2, most=1.5, every=5)
    party.answer(0, 0.0, 0.1)
    party.answer(1, 50.0, 0.1)
    errors = dict.fromkeys(range(7), 0.1) | {7: 0.9, 8: 0.9, 9: 0.9}
    for turn in range(30):
        party.round(errors)
        for device in list(party.branches._founders):
            party.answer(device, 100.0 + 10 * turn, 0.9)
        assert len({party.lineage_of(device) for device in range(10)}) <= 3
    assert any(line["into"] == "cluster-2" for line in party.lines("split"))


@pytest.mark.parametrize(("most", "cap"), [(1.0, 2), (1.7, 3), (2.0, 4)])
def test_the_cap_is_whole(most, cap):
    assert Party(1, clusters=2, most=most).branches.most == cap


def test_with_one_cluster_and_no_more_devices_need_not_give_feedback():
    assert not Party(1, clusters=1, most=1.0).tasks[0].spec.feedback
    assert Party(1, clusters=1, most=2.0).tasks[0].spec.feedback


def test_a_founder_who_vanishes_makes_room():
    party = founded(most=2.0)
    party.dies(4)
    errors = dict.fromkeys(range(3), 0.1) | {3: 0.9}
    assert refined(party, errors) == {}
    assert refined(party, errors) == {3: "cluster-2"}
    assert set(party.branches._clusters) == {MAIN, "cluster-2"}


def test_one_who_is_away_founds_nothing():
    party = Party(6, clusters=1, most=4.0, every=6)
    party.round({5: 0.9, 0: 0.1, 1: 0.1, 2: 0.1})
    party.dies(5)
    party.hear(Left(5))
    party.round({3: 0.1, 4: 0.1})
    assert not party.branches._founders


# Opening and closing


def founder_uploads(party, times):
    for _ in range(times):
        party.answer(4, 7.0, 0.1)


def test_after_a_while_the_badly_served_are_asked_to_join_the_founder():
    party = founded(ask=1000)
    founder_uploads(party, SEED_UPLOADS - 1)
    party.round({0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1})
    assert not any(party.offered(device) for device in range(4))
    founder_uploads(party, 1)
    party.round({0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1})
    assert [bool(party.offered(device)) for device in range(4)] == [False, True, False, False]
    assert party.offered(1) == ["cluster-1"]


@pytest.mark.parametrize("partial", [False, True])
def test_a_new_cluster_trains_its_output_layer_alone_until_it_is_open(partial):
    party = founded(partial=partial)
    assert not party.tasks[4].spec.last_layer_only
    party.answer(4, 7.0, 0.1)
    for _ in range(SEED_UPLOADS - 1):
        assert party.tasks[4].spec.last_layer_only is partial
        assert not party.tasks[0].spec.last_layer_only
        founder_uploads(party, 1)
    assert not party.tasks[4].spec.last_layer_only


def test_a_founder_who_stays_alone_goes_back():
    party = founded(need=0.5)
    founder_uploads(party, 2 * SEED_UPLOADS - 1)
    refined(party, dict.fromkeys(range(4), 0.1))
    assert not party.lines("merge")
    founder_uploads(party, 1)
    refined(party, dict.fromkeys(range(4), 0.1))
    assert party.lines("merge") == [{**MERGED, "reason": "nobody joined its founder"}]
    assert party.lineage_of(4) == MAIN
    assert party.at(MAIN) == 0.0  # its model goes with it
    assert "cluster-1" not in party.branches._clusters


def test_a_founder_with_company_stays():
    party = founded(ask=1000)
    founder_uploads(party, SEED_UPLOADS)
    party.round({3: 0.3})
    party.answer(3, 7.0, 0.1, choice=1, loss_0=2.0, loss_1=0.1)
    assert party.lineage_of(3) == "cluster-1"
    founder_uploads(party, SEED_UPLOADS)
    party.round(dict.fromkeys(range(3), 0.1))
    party.round(dict.fromkeys(range(3), 0.1))
    assert party.lineage_of(3) == party.lineage_of(4) == "cluster-1"
    assert not party.lines("merge")


def test_a_cluster_that_everybody_has_left_is_closed():
    party = seeded(3, every=4)
    party.answer(1, 0.0, 0.1)
    assert party.lineage_of(1) == MAIN
    party.round(dict.fromkeys(range(3), 0.1))
    assert party.lines("merge") == [{**MERGED, "reason": "nobody is left"}]
    assert party.server.store.lineages == (MAIN,)


def test_what_was_sent_from_a_closed_cluster_goes_to_what_took_it_in():
    party = seeded(3, every=4)
    late = party.tasks[1]
    party.comes_back(1)
    party.answer(1, 0.0, 0.1)
    party.round(dict.fromkeys(range(3), 0.1))
    assert "cluster-1" not in party.server.store
    before = party.server.store.staleness(late.version, MAIN)
    party.answer(1, 0.0, 0.1, task=late)
    line = party.lines("arrival")[-1]
    assert (line["lineage"], line["sent"], line["staleness"]) == (MAIN, late.version, before)


def test_the_main_lineage_may_be_gone():
    """It was absorbed; a cluster without a parent goes where the main one went."""
    party = seeded(3, every=2)
    party.server.fork(MAIN, "cluster-9")
    party.server.absorb("cluster-1", MAIN)
    party.answer(2, 8.0, 0.1)
    party.answer(1, 8.0, 0.1)
    assert party.server.store.lineages == ("cluster-1",)
    party.hear(Joined(7))
    assert party.tasks[7].lineage == "cluster-1"


# Uniting


def alike(extra=0.1, error=0.1, **options):
    """Devices 0 and 2 at 0, device 1 at 8, who would lose `extra` among the others."""
    party = Party(3, **{"ask": 2, "every": 3, "gap": 100.0, **options})
    party.answer(0, 0.0, error, **TWO)
    party.answer(1, 8.0, error, **TWO)
    party.answer(2, 0.0, error, **TWO)
    party.answer(1, 8.0, error, **TWO)
    assert party.offered(1) == [MAIN]
    party.answer(1, 8.0, error, **TWO, loss_0=1.0, loss_1=1.0 + extra)
    return party


def test_two_clusters_that_are_alike_become_one_by_algorithm_1():
    party = alike()
    assert party.branches._uniting == (MAIN, "cluster-1")
    assert not party.lines("merge")  # until somebody tells which way the main model goes
    party.answer(1, 8.0, 0.1, **TWO)
    assert not party.lines("merge")
    party.answer(0, [1.0, 2.0, 0.0, 0.0, -1.0, 0.0], 0.1, **TWO)
    assert party.lines("merge") == [{**MERGED, "reason": "the two closest"}]
    # The upload is merged first, one commit late: then (8 - head) * delta, in units of its maximum.
    a = 0.6 / math.sqrt(2)
    head = [a, 2 * a, 0.0, 0.0, -a, 0.0]
    top = (8 - 2 * a) * 2
    alpha = [(8 - a) / top, 1.0, 0.0, 0.0, 0.0, 0.0]
    expected = [share * 8 + (1 - share) * h for share, h in zip(alpha, head, strict=True)]
    assert party.server.store.head_params(MAIN).tolist() == pytest.approx(expected, rel=1e-5)
    assert {party.lineage_of(device) for device in range(3)} == {MAIN}


def test_those_who_would_lose_much_stay_apart():
    """0.25 of the loss of chance, which is log 2 for two classes."""
    assert alike(extra=0.17).branches._uniting is not None
    assert alike(extra=0.18).branches._uniting is None


def test_a_cluster_that_does_not_serve_its_own_takes_nobody_in():
    assert alike(error=0.3, most=1.0).branches._uniting is None


def test_a_union_whose_part_is_gone_is_called_off():
    party = alike()
    party.server.absorb(MAIN, "cluster-1")
    assert party.branches._uniting is None
    party.answer(0, 0.0, 0.1)
    assert not party.lines("merge")


def test_too_many_clusters_are_united_by_their_soft_labels():
    """Three clusters where two are allowed; those of devices 1 and 2 predict the same."""
    party = Party(3, clusters=3, every=1)
    party.branches.most = 2
    same = {"soft_0": 0.9, "soft_1": 0.1}
    party.answer(0, 0.0, 0.1, soft_0=0.1, soft_1=0.9)
    party.answer(1, 8.0, 0.1, **same)
    party.answer(2, 30.0, 0.1, **same)
    assert set(party.branches._uniting) == {"cluster-1", "cluster-2"}


def test_a_main_model_that_nobody_uses_does_not_count():
    party = seeded(3, every=1, most=1.0)
    party.answer(0, 8.0, 0.1)
    party.server.fork("cluster-1", "cluster-2")
    party.server.store.commit("cluster-2", full(16))
    party.answer(2, 16.0, 0.1)
    assert [party.lineage_of(d) for d in range(3)] == ["cluster-1", "cluster-1", "cluster-2"]
    assert party.branches._uniting is None


# Hostile devices

LIES = [
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


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_whatever_a_device_tells_the_server_goes_on(lie):
    party = Party(6, ask=1, every=1)
    for turn in range(12):
        for device in range(6):
            world = 8.0 * (device % 2)
            truth = {"error": 0.1, "soft_0": 0.5, "soft_1": 0.5}
            if party.offered(device):
                here = party.tasks[device].lineage == (MAIN if world == 0 else "cluster-1")
                truth |= {"loss_0": 0.1 if here else 3.0, "loss_1": 3.0 if here else 0.1}
            # The first to be heard lies, too.
            party.answer(device, world, **(lie if device in (0, 3) and turn != 5 else truth))
    assert not party.lines("refusal")
    homes = [party.lineage_of(device) for device in (1, 2, 4, 5)]
    assert homes[0] == homes[3] != homes[1] == homes[2]
    state = party.server.state()
    json.dumps(encode(state)[0], allow_nan=False)


def test_one_liar_cannot_speak_for_a_cluster():
    """Two would lose four times the loss of chance, one claims to gain without bounds."""
    party = seeded(4)
    for device in (1, 2, 3):
        party.answer(device, 8.0, 0.1, **TWO)
        party.branches._members[device].fits = {"cluster-1": 0.0, MAIN: 50.0}
    party.branches._members[3].fits = {"cluster-1": 1e300, MAIN: 0.0}
    pairing = ClusterDistances(party.branches._members, {"cluster-1": [1, 2, 3]}, party.server)
    lost = pairing.extra_loss("cluster-1", MAIN)
    assert lost == pytest.approx((4 + 4 - 4) / 3)


# Lineages come and go; checkpoints


def test_a_fork_opens_a_cluster_and_keeps_what_is_known_of_it():
    branches = Clustering()
    branches.on_fork(MAIN, "cluster-5")
    assert branches._clusters["cluster-5"].open
    branches._clusters["cluster-6"] = ClusterState(founder=3, open=False)
    branches.on_fork(MAIN, "cluster-6")
    assert branches._clusters["cluster-6"].founder == 3


def test_absorbing_forgets_the_one_and_the_hopes_of_the_other():
    branches = Clustering()
    branches._clusters = {
        MAIN: ClusterState(best=0.1, stuck=2, rest=4),
        "cluster-1": ClusterState(),
    }
    branches._uniting = (MAIN, "cluster-2")
    branches.on_absorb(MAIN, "cluster-1")
    assert set(branches._clusters) == {MAIN}
    kept = branches._clusters[MAIN]
    assert (kept.best, kept.stuck, kept.rest) == (math.inf, 0, 4)
    assert branches._uniting == (MAIN, "cluster-2")


def rich_party():
    """A founder, a question, answers, soft labels, a device that tells nothing, a union."""
    party = alike()
    party.hear(Joined(3))
    party.answer(3, 0.0)
    party.branches._founders[2] = "cluster-7"
    party.branches._clusters["cluster-7"] = ClusterState(founder=2, founded=1, open=False)
    party.branches._direction = full(1)
    return party


def through_a_file(state):
    tree, tensors = encode(state)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), storable(tensors))


def test_its_state_survives_a_file():
    branches = rich_party().branches
    twin = Clustering()
    twin.restore(through_a_file(branches.state()))
    for name in ("_named", "_clusters", "_founders", "_uniting", "_usual"):
        assert getattr(twin, name) == getattr(branches, name)
    assert torch.equal(twin._direction, branches._direction)
    assert math.isnan(twin._members[3].judgement)
    assert twin._members.keys() == branches._members.keys()
    for device, member in branches._members.items():
        again = twin._members[device]
        assert (again.uploads, again.asked, again.question) == (
            member.uploads,
            member.asked,
            member.question,
        )
        assert (again.offered, again.answers, again.fits) == (
            member.offered,
            member.answers,
            member.fits,
        )
        assert (again.soft is None) == (member.soft is None)
        assert member.soft is None or torch.equal(again.soft, member.soft)


def test_its_state_is_a_copy():
    party = rich_party()
    state = through_a_file(party.branches.state())
    before = json.dumps(encode(state)[0])
    kept = party.branches.state()
    party.answer(1, 8.0, 0.9, **TWO)
    party.answer(0, 0.0, 0.9, **TWO)
    assert json.dumps(encode(kept)[0]) == before


def test_a_question_survives_a_checkpoint():
    party = seeded(2, ask=2)
    party.answer(1, 8.0)
    twin = Party(0, ask=2)
    twin.server.restore(through_a_file(party.server.state()))
    task = twin.server.open_tasks[party.tasks[1].id]
    twin.answer(1, 8.0, task=task, loss_0=0.25, loss_1=1.5)
    assert twin.branches._members[1].fits == {"cluster-1": 0.25, MAIN: 1.5}

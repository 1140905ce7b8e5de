"""Who is selected: hand-worked utilities, turns, exploration, and what a checkpoint must hold."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from commands import sends
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Contribution,
    Failed,
    Joined,
    Note,
    Task,
    TrainSpec,
    Update,
)
from latecomer.core.server import Server
from latecomer.errors import BadInput
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.papers.fedprox import fedprox
from latecomer.strategies.papers.oort import oort
from latecomer.strategies.parts.selecting import Oort, percentile, statistical_utility
from latecomer.strategies.recipe import build_strategy
from toy import ToyRun, toy_fleet, toy_run, toy_server

SELECTING = ["fedavg", "fedprox", "semi-async", "weighted", "unstale"]


def heard(device, utility, seconds=1.0):
    task = Task(0, device, 0, MAIN, 0, TrainSpec(), torch.zeros(2))
    update = Update(0, torch.zeros(2), 1, {"loss_rms": utility})
    return Contribution(task, update, task.params, update.delta, MAIN, 0, seconds=seconds)


def answer(task, delta=1.0, seconds=1.0, loss=1.0):
    return Arrived(
        task.device, Update(task.id, torch.tensor([delta]), 1, {"loss_rms": loss}), seconds
    )


def serve(strategy, devices=10, seed=0):
    server = Server(torch.zeros(1), strategy, TrainSpec(), seed=seed)
    return server, sends(server.handle(*map(Joined, range(devices))))


# Shares and turns


@pytest.mark.parametrize(("fraction", "count"), [(0.07, 7), (0.3, 30), (0.001, 1), (1.0, 100)])
@pytest.mark.parametrize("select", ["random", "round-robin", "oort"])
def test_a_fraction_is_a_whole_number_of_devices(fraction, count, select):
    _, tasks = serve(fedavg(fraction=fraction, select=select), devices=100)
    assert len({task.device for task in tasks}) == len(tasks) == count


def test_round_robin_takes_turns():
    server, tasks = serve(fedavg(fraction=0.4, select="round-robin"), devices=5)
    turns = []
    for _ in range(4):
        turns.append([task.device for task in tasks])
        tasks = sends(server.handle(*map(answer, tasks)))
    assert turns == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_round_robin_passes_over_who_is_not_there():
    server, tasks = serve(fedavg(fraction=0.4, select="round-robin"), devices=5)
    lost, there = tasks
    (two, three) = sends(server.handle(answer(there), Failed(lost.id, "gone")))
    assert [two.device, three.device] == [2, 3]
    # Three were known besides: device 0 is gone, so 40% are two again.
    assert [t.device for t in sends(server.handle(answer(two), answer(three)))] == [4, 1]


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("select", ["everyone", "round-robin", "oort"])
def test_who_selects_all_is_the_plain_strategy(name, select):
    assert toy_run(name, 60, select=select).heads() == toy_run(name, 60).heads()


def test_oort_of_all_is_fedavg():
    plain = toy_run("fedavg", 60)
    assert toy_run("oort", 60, fraction=1.0).heads() == plain.heads()


@pytest.mark.parametrize("name", SELECTING)
def test_everyone_leaves_nobody_out(name):
    with pytest.raises(BadInput, match="everyone"):
        build_strategy(name, {"select": "everyone", "fraction": 0.5})


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("select", ["random", "round-robin", "oort"])
def test_a_part_of_the_fleet_is_at_work(name, select):
    run = toy_run(name, 40, select=select, fraction=0.4)
    arrivals = Counter(f["device"] for _, f in run.lines("arrival"))
    assert set(arrivals) == set(range(5))
    assert max(len(sent) for sent in rounds(run)) == 2


# What Oort asks for, and what it makes of it


@pytest.mark.parametrize(
    "strategy", [fedavg(select="oort"), fedprox(mu=0.3, select="oort"), oort()]
)
def test_devices_are_asked_for_their_loss(strategy):
    spec = Server(torch.zeros(1), strategy, TrainSpec(lr=0.5)).spec
    assert spec.report_loss
    assert spec.lr == 0.5
    assert spec.prox == (0.3 if strategy.name == "fedprox" else 0.0)


def test_nobody_else_asks_for_it():
    assert not Server(torch.zeros(1), fedavg(fraction=0.3), TrainSpec()).spec.report_loss


def test_statistical_utility_is_size_times_loss():
    told = heard(0, 2.5)
    told.update.num_examples = 4
    assert statistical_utility(told) == 10.0


def test_the_norm_of_the_delta_stands_for_a_loss_that_is_not_reported():
    silent = heard(0, 0.0)
    silent.update.metrics, silent.update.num_examples = {}, 2
    silent.delta = torch.tensor([3.0, 4.0])
    assert statistical_utility(silent) == 10.0


@pytest.mark.parametrize(("loss", "utility"), [(-5.0, 0.0), (1e300, 1e200)])
def test_a_lie_about_the_loss_stays_a_number(loss, utility):
    assert statistical_utility(heard(0, loss)) == utility


def test_percentile():
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], 0.4) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.95) == 95.0
    assert percentile([7.0], 0.01) == 7.0


def test_utility_by_hand():
    """Round 8, T = 2 s (60% of the devices keep it), alpha = 2."""
    select = Oort(0.5, pace=0.6)
    select._round = 2
    select.hear(heard(0, 10.0, seconds=1.0))
    select.hear(heard(1, 5.0, seconds=2.0))
    select._round = 4
    select.hear(heard(2, 5.0, seconds=8.0))
    select._round = 8
    scores = select.scores([0, 1, 2])
    assert scores[0] == pytest.approx(1.0 + math.sqrt(0.1 * math.log(8) / 2))
    assert scores[1] == pytest.approx(0.5 + math.sqrt(0.1 * math.log(8) / 2))
    assert scores[2] == pytest.approx((0.5 + math.sqrt(0.1 * math.log(8) / 4)) * (2 / 8) ** 2)


def test_utility_is_clipped_at_95_percent():
    select = Oort(0.5, pace=1.0)
    for device in range(20):
        select.hear(heard(device, 1000.0 if device == 7 else 1.0 + device))
    select._round = 1
    scores = select.scores(range(20))
    assert scores[7] == scores[19] == 1.0
    assert scores[9] == 0.5


def test_the_pacer_gives_more_time_when_the_use_falls():
    select = Oort(0.5, pace=0.3, step=0.2, window=2)
    paces = []
    for utility in [4.0, 4.0, 2.0, 2.0, 3.0, 3.0, 1.0, 1.0, 1.0]:
        select._begin_round()
        paces.append(round(select.pace, 3))
        select.hear(heard(0, utility))
    # Round 6 compares 4 + 2 of rounds 2 and 3 with 2 + 3 of 4 and 5; round 8 2 + 3 with 3 + 1.
    assert paces == [0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 0.5, 0.7, 0.7]
    assert len(select._history) == 4


def test_exploration_fades():
    select = Oort(0.5, explore=0.8, decay=0.5, least=0.3)
    shares = []
    for _ in range(4):
        select._begin_round()
        shares.append(select.explore)
    assert shares == [0.8, 0.4, 0.3, 0.3]


def test_half_are_known_and_half_are_new():
    """K = 6 of 12, half of them new; of six known ones the three best are taken."""
    select = Oort(0.5, explore=0.5, decay=1.0, pace=1.0)
    for device in range(6):
        select.hear(heard(device, 100.0 if device < 3 else 1.0))
    select._begin_round()
    chosen = select._choose(range(12), 6, chance())
    assert {0, 1, 2} <= set(chosen)
    assert len([d for d in chosen if d >= 6]) == 3
    assert len(set(chosen)) == 6


def test_too_few_new_ones_leave_room_for_known_ones():
    select = Oort(0.5, explore=1.0)
    for device in range(5):
        select.hear(heard(device, 1.0))
    select._begin_round()
    chosen = select._choose(range(6), 4, chance())
    assert 5 in chosen
    assert len(set(chosen)) == 4


def test_who_was_there_too_often_stays_out():
    select = Oort(0.5, explore=0.0, most_turns=2)
    for device in range(10):
        for _ in range(3 if device in (2, 5) else 1):
            select.hear(heard(device, 100.0 if device in (2, 5) else 1.0))
    select._begin_round()
    chosen = select._choose(range(10), 8, chance())
    assert set(chosen) == set(range(10)) - {2, 5}
    # Nobody else is there: better those than none.
    assert set(select._choose([2, 5], 1, chance())) <= {2, 5}


def test_no_more_than_three_in_ten_are_left_out():
    select = Oort(0.5, most_turns=1)
    for device in range(10):
        for _ in range(2 + (device == 4)):
            select.hear(heard(device, 1.0))
    assert select._barred() == {4, 0, 1}


# Rounds


def test_thirteen_are_asked_and_ten_are_waited_for():
    server, tasks = serve(oort(fraction=0.5), devices=20)
    assert len(tasks) == 13
    for task in tasks[:9]:
        server.handle(answer(task))
    assert server.store.commits == 0
    server.handle(answer(tasks[9]))
    assert server.store.commits == 1
    commands = server.handle(answer(tasks[10], delta=99.0, seconds=7.0, loss=3.0))
    assert any(c.kind == "drop" for c in commands if isinstance(c, Note))
    assert server.store.head_params().item() == 1.0
    # What it took, and what its data are worth, is known all the same.
    assert server.strategy.dispatch.select._heard[tasks[10].device].seconds == 7.0


@pytest.mark.parametrize(
    ("devices", "asked", "waited"), [(1, 1, 1), (3, 3, 3), (8, 5, 4), (7, 5, 4)]
)
def test_small_rounds(devices, asked, waited):
    fraction = 1.0 if devices < 8 and asked == devices else 0.5
    server, tasks = serve(oort(fraction=fraction), devices=devices)
    assert len(tasks) == asked
    for count, task in enumerate(tasks, start=1):
        server.handle(answer(task))
        if count <= waited:
            assert server.store.commits == (count == waited)


def rounds(run):
    """Which devices were sent each version."""
    sent = {}
    for _, fields in run.lines("dispatch"):
        sent.setdefault(fields["version"], []).append(fields["device"])
    return list(sent.values())


def test_without_exploration_devices_starve():
    """Two of five are ever asked: those whom chance took first."""
    run = toy_run("oort", 200, fraction=0.4, overcommit=1.0, explore=0.0)
    assert len({f["device"] for _, f in run.lines("dispatch")}) == 2


def test_with_exploration_everybody_is_selected_some_time():
    run = toy_run("oort", 200, toy_fleet(20), fraction=0.1, overcommit=1.0)
    assert {f["device"] for _, f in run.lines("arrival")} == set(range(20))


def test_slow_devices_are_selected_less():
    run = toy_run("oort", 400, toy_fleet(20), fraction=0.2, overcommit=1.0)
    counts = Counter(f["device"] for _, f in run.lines("arrival"))
    assert sum(counts[d] for d in range(5)) > 3 * sum(counts[d] for d in range(15, 20))


@pytest.mark.parametrize("select", ["round-robin", "oort"])
@pytest.mark.parametrize("name", ["fedavg", "semi-async"])
@pytest.mark.parametrize("after", [1, 9, 26])
def test_checkpoint_and_resume(name, select, after):
    options = {"select": select, "fraction": 0.4}
    whole, first, second = (ToyRun(toy_server(name, options), toy_fleet()) for _ in range(3))
    for run in (whole, first):
        run.until(after)
    whole.until(60)
    first.carried_over(second)
    second.until(60)
    assert first.log + second.log == whole.log
    assert second.heads() == whole.heads()


@pytest.mark.parametrize(
    ("option", "value"),
    [("fraction", 0.0), ("overcommit", 0.9), ("explore", 1.5), ("window", 0), ("most_turns", -1)],
)
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("oort", {option: value})


def test_an_unknown_way_to_select_is_named():
    with pytest.raises(BadInput, match="select"):
        build_strategy("fedavg", {"select": "best"})


def chance():
    return np.random.default_rng(0)

"""Selection of devices: hand-worked utilities, exploration, checkpoints."""

import math
from collections import Counter

import pytest
import torch

from commands import logged, sends
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Contribution,
    Joined,
    Task,
    TrainSpec,
    Update,
)
from latecomer.core.pool import Pool
from latecomer.core.server import Server
from latecomer.core.store import ModelStore
from latecomer.errors import BadInput
from latecomer.strategies.papers.fedavg import fedavg
from latecomer.strategies.papers.oort import oort
from latecomer.strategies.parts.selecting import Oort, percentile, statistical_utility
from latecomer.strategies.recipe import build_strategy, recipes
from toy import ToyRun, toy_fleet, toy_run, toy_server

SELECTING = [name for name, recipe in recipes().items() if "select" in recipe.options]


def contribution(device, utility, seconds=1.0):
    task = Task(0, device, 0, MAIN, 0, TrainSpec(), torch.zeros(2))
    update = Update(0, torch.zeros(2), 1, {"loss_rms": utility})
    return Contribution(task, update, task.params, update.delta, MAIN, 0, seconds=seconds)


class View:
    """The part of the server's state that selection reads: these devices are idle."""

    def __init__(self, *idle):
        self.idle, self.working = Pool(idle), {}
        self.store, self.seed, self.tasks_given = ModelStore(torch.zeros(1)), 0, 0


def report(select, device, utility, seconds=1.0):
    """An update of the device arrives, of this utility and after this long."""
    select.on_arrival(contribution(device, utility, seconds), View())


def answer(task, delta=1.0, seconds=1.0, loss=1.0):
    return Arrived(
        task.device, Update(task.id, torch.tensor([delta]), 1, {"loss_rms": loss}), seconds
    )


def serve(strategy, devices=10, seed=0):
    server = Server(torch.zeros(1), strategy, TrainSpec(), seed=seed)
    return server, sends(server.handle(*map(Joined, range(devices))))


# Shares


@pytest.mark.parametrize(("fraction", "count"), [(0.07, 7), (0.3, 30), (0.001, 1), (1.0, 100)])
@pytest.mark.parametrize("select", ["random", "oort"])
def test_a_fraction_is_a_whole_number_of_devices(fraction, count, select):
    _, tasks = serve(fedavg(fraction=fraction, select=select), devices=100)
    assert len({task.device for task in tasks}) == len(tasks) == count


@pytest.mark.parametrize("name", SELECTING)
def test_selecting_all_devices_is_the_plain_strategy(name):
    assert toy_run(name, 60, select="oort").heads() == toy_run(name, 60).heads()


def test_oort_of_all_is_fedavg():
    plain = toy_run("fedavg", 60)
    assert toy_run("oort", 60, fraction=1.0).heads() == plain.heads()


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("select", ["random", "oort"])
def test_a_fraction_of_the_fleet_is_at_work(name, select):
    run = toy_run(name, 40, select=select, fraction=0.4)
    arrivals = Counter(f["device"] for _, f in run.lines("arrival"))
    assert set(arrivals) == set(range(5))
    assert max(len(sent) for sent in rounds(run)) == 2


# Oort: reported losses, utilities and choices


@pytest.mark.parametrize(
    "strategy",
    [fedavg(select="oort"), build_strategy("fedprox", {"mu": 0.3, "select": "oort"}), oort()],
)
def test_devices_report_their_loss(strategy):
    spec = Server(torch.zeros(1), strategy, TrainSpec(lr=0.5)).spec
    assert spec.report_loss
    assert spec.lr == 0.5
    assert spec.prox == (0.3 if strategy.name == "fedprox" else 0.0)


def test_without_oort_devices_report_no_loss():
    assert not Server(torch.zeros(1), fedavg(fraction=0.3), TrainSpec()).spec.report_loss


def test_statistical_utility_is_size_times_loss():
    reported = contribution(0, 2.5)
    reported.update.num_examples = 4
    assert statistical_utility(reported) == 10.0


def test_the_norm_of_the_delta_replaces_a_loss_that_is_not_reported():
    silent = contribution(0, 0.0)
    silent.update.metrics, silent.update.num_examples = {}, 2
    silent.delta = torch.tensor([3.0, 4.0])
    assert statistical_utility(silent) == 10.0


@pytest.mark.parametrize(("loss", "utility"), [(-5.0, 0.0), (1e300, 1e200)])
def test_an_implausible_loss_gives_a_finite_utility(loss, utility):
    assert statistical_utility(contribution(0, loss)) == utility


def test_percentile():
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], 0.4) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.95) == 95.0
    assert percentile([7.0], 0.01) == 7.0


def start_rounds(select, count):
    for _ in range(count):
        select(View(0))


def test_utility_by_hand():
    """Round 8, T = 2 s (60% of the devices keep it), alpha = 2."""
    select = Oort(0.5, pace=0.6)
    start_rounds(select, 2)
    report(select, 0, 10.0, seconds=1.0)
    report(select, 1, 5.0, seconds=2.0)
    start_rounds(select, 2)
    report(select, 2, 5.0, seconds=8.0)
    start_rounds(select, 4)
    scores = select.scores([0, 1, 2])
    assert scores[0] == pytest.approx(1.0 + math.sqrt(0.1 * math.log(8) / 2))
    assert scores[1] == pytest.approx(0.5 + math.sqrt(0.1 * math.log(8) / 2))
    assert scores[2] == pytest.approx((0.5 + math.sqrt(0.1 * math.log(8) / 4)) * (2 / 8) ** 2)


def test_utility_is_clipped_at_95_percent():
    select = Oort(0.5, pace=1.0)
    for device in range(20):
        report(select, device, 1000.0 if device == 7 else 1.0 + device)
    start_rounds(select, 1)
    scores = select.scores(range(20))
    assert scores[7] == scores[19] == 1.0
    assert scores[9] == 0.5


def test_the_pacer_gives_more_time_when_the_utility_falls():
    select = Oort(0.5, pace=0.3, step=0.2, window=2)
    paces = []
    for utility in [4.0, 4.0, 2.0, 2.0, 3.0, 3.0, 1.0, 1.0, 1.0]:
        start_rounds(select, 1)
        paces.append(round(select.pace, 3))
        report(select, 0, utility)
    # Round 6 compares 4 + 2 of rounds 2 and 3 with 2 + 3 of 4 and 5; round 8 2 + 3 with 3 + 1.
    assert paces == [0.3, 0.3, 0.3, 0.3, 0.3, 0.5, 0.5, 0.7, 0.7]
    assert len(select.state()["history"]) == 4


def test_exploration_fades():
    select = Oort(0.5, explore=0.8, decay=0.5, explore_min=0.3)
    shares = []
    for _ in range(4):
        start_rounds(select, 1)
        shares.append(select.explore)
    assert shares == [0.8, 0.4, 0.3, 0.3]


def test_half_are_known_and_half_are_new():
    """K = 6 of 12, half of them new; of six known ones the three best are taken."""
    select = Oort(0.5, explore=0.5, decay=1.0, pace=1.0)
    for device in range(6):
        report(select, device, 100.0 if device < 3 else 1.0)
    chosen = select(View(*range(12)))
    assert {0, 1, 2} <= set(chosen)
    assert len([d for d in chosen if d >= 6]) == 3
    assert len(set(chosen)) == 6


def test_too_few_new_ones_leave_room_for_known_ones():
    select = Oort(2 / 3, explore=1.0)
    for device in range(5):
        report(select, device, 1.0)
    chosen = select(View(*range(6)))
    assert 5 in chosen
    assert len(set(chosen)) == 4


def test_a_device_selected_too_often_is_left_out():
    select = Oort(0.8, explore=0.0, max_participations=2)
    for device in range(10):
        for _ in range(3 if device in (2, 5) else 1):
            report(select, device, 100.0 if device in (2, 5) else 1.0)
    chosen = select(View(*range(10)))
    assert set(chosen) == set(range(10)) - {2, 5}
    # No other device is idle: better one of those than none.
    select.fraction = 0.5
    (chosen,) = select(View(2, 5))
    assert chosen in {2, 5}


def test_no_more_than_three_in_ten_are_left_out():
    select = Oort(0.7, explore=0.0, max_participations=1)
    for device in range(10):
        for _ in range(2 + (device == 4)):
            report(select, device, 1.0)
    assert set(select(View(*range(10)))) == set(range(10)) - {4, 0, 1}


# Rounds


def test_thirteen_are_asked_and_ten_are_waited_for():
    server, tasks = serve(oort(fraction=0.5), devices=20)
    assert len(tasks) == 13
    for task in tasks[:9]:
        server.handle(answer(task))
    assert server.store.commits == 0
    server.handle(answer(tasks[9]))
    assert server.store.commits == 1
    commands = server.handle(answer(tasks[10], delta=9.0, seconds=7.0, loss=3.0))
    assert logged(commands, "drop")
    assert server.store.head_params().item() == 1.0
    # Its seconds and its utility are recorded all the same.
    assert server.strategy.dispatch.select.state()["records"][tasks[10].device].seconds == 7.0


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
    """Two of five are ever asked: those that were drawn first."""
    run = toy_run("oort", 200, fraction=0.4, overcommit=1.0, explore=0.0)
    assert len({f["device"] for _, f in run.lines("dispatch")}) == 2


def test_with_exploration_every_device_is_selected():
    run = toy_run("oort", 200, toy_fleet(20), fraction=0.1, overcommit=1.0)
    assert {f["device"] for _, f in run.lines("arrival")} == set(range(20))


def test_slow_devices_are_selected_less():
    run = toy_run("oort", 400, toy_fleet(20), fraction=0.2, overcommit=1.0)
    counts = Counter(f["device"] for _, f in run.lines("arrival"))
    assert sum(counts[d] for d in range(5)) > 3 * sum(counts[d] for d in range(15, 20))


@pytest.mark.parametrize("name", ["fedavg", "semi-async"])
@pytest.mark.parametrize("after", [1, 9, 26])
def test_checkpoint_and_resume(name, after):
    options = {"select": "oort", "fraction": 0.4}
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
    [
        ("fraction", 0.0),
        ("overcommit", 0.9),
        ("explore", 1.5),
        ("window", 0),
        ("max_participations", -1),
    ],
)
def test_a_bad_option_is_named(option, value):
    with pytest.raises(BadInput, match=option):
        build_strategy("oort", {option: value})


def test_an_unknown_selection_is_named():
    with pytest.raises(BadInput, match="select"):
        build_strategy("fedavg", {"select": "best"})

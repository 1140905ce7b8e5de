"""Hand-worked rules, and one device of five that sends garbage."""

import numpy as np
import pytest
import torch

from commands import sends
from latecomer.core.checks import Checks
from latecomer.core.messages import Arrived, Contribution, Joined, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.strategies.papers.fedbuff import fedbuff
from latecomer.strategies.papers.robust import (
    Votes,
    clip,
    krum,
    mean,
    median,
    robust,
    trimmed_mean,
    votes_of,
)
from latecomer.strategies.papers.semi_async import semi_async
from latecomer.strategies.recipe import build_strategy

RULES = ["median", "trimmed-mean", "krum", "multi-krum", "clip"]


def votes(*rows):
    values = torch.tensor(rows)
    return Votes(values, torch.ones(len(rows), 1, dtype=torch.bool))


def sent(device, *delta, weight=1.0, submodel=None):
    params = torch.zeros(len(delta))
    task = Task(device, device, 0, "main", 0, TrainSpec(), params, submodel)
    delta = torch.tensor(delta)
    return Contribution(task, Update(device, delta, 1), params, delta, "main", 0, weight)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (mean, 21.8),
        (median, 3.0),
        (trimmed_mean(0.0), 21.8),
        (trimmed_mean(0.2), 3.0),  # of 1, 3, 5
        (trimmed_mean(0.19), 21.8),  # less than one whole voter is cut
        # Squared distances to the two nearest: 1 + 9, 1 + 4, 4 + 4, 4 + 16, and the far one.
        (krum(1), 1.0),
        (krum(1, selected=0), 2.0),  # the best n - f - 2 = 2: 1 and 3
        (krum(1, selected=3), 4 / 3),
        (clip(0.0), 2.0),  # 0, 1, 3, and two that are cut to 3
        (clip(4.0), 2.4),  # 0, 1, 3, 4, 4
    ],
)
def test_rules_on_five_numbers(rule, expected):
    delta, heard = rule(votes([0.0], [1.0], [3.0], [5.0], [100.0]))
    assert delta.tolist() == pytest.approx([expected])
    assert heard.all()


def test_the_median_of_an_even_number_is_between_the_two_in_the_middle():
    assert median(votes([1.0, 0.0], [2.0, 9.0], [4.0, 1.0], [90.0, -9.0]))[0].tolist() == [3.0, 0.5]


def test_clipping_keeps_the_direction():
    delta, _ = clip(5.0)(votes([3.0, 4.0], [60.0, 80.0], [0.0, 0.0]))
    assert delta.tolist() == pytest.approx([2.0, 8 / 3])


def test_a_share_that_floating_point_misses_by_a_hair():
    rows = [[float(i)] for i in range(100)]
    delta, _ = trimmed_mean(0.29)(votes(*rows))  # 0.29 * 100 = 28.999...
    assert delta.item() == pytest.approx(49.5)
    rows[:29], rows[71:] = [[-1e6]] * 29, [[1e9]] * 29
    assert trimmed_mean(0.29)(votes(*rows))[0].item() == pytest.approx(49.5)


def test_several_updates_of_a_device_are_one_voice():
    given = [sent(0, 8.0), sent(0, 10.0), sent(0, 12.0), sent(1, 1.0), sent(2, 2.0)]
    head = torch.zeros(1)
    assert votes_of(given, head, per_device=True).values.tolist() == [[10.0], [1.0], [2.0]]
    assert robust(median)("main", head, given, 1.0).item() == 2.0
    assert robust(median, per_device=False)("main", head, given, 1.0).item() == 8.0


def test_a_weight_is_a_factor_on_the_delta():
    given = [sent(0, 4.0, weight=0.5), sent(1, 1.0), sent(2, 3.0)]
    assert robust(median)("main", torch.zeros(1), given, 0.5).item() == 1.0


# Sub-models.

FIRST = Submodel("first", torch.tensor([0]))
SECOND = Submodel("second", torch.tensor([1]))


def test_each_coordinate_has_the_votes_of_those_who_trained_it():
    given = [sent(0, 1.0, 1.0, 1.0), sent(1, 3.0, 3.0, 5.0), sent(2, 10.0, submodel=FIRST)]
    head = torch.zeros(3)
    assert robust(median)("main", head, given, 1.0).tolist() == [3.0, 2.0, 3.0]
    assert robust(trimmed_mean(0.4))("main", head, given, 1.0).tolist() == [3.0, 2.0, 3.0]
    assert robust(mean)("main", head, given, 1.0).tolist() == pytest.approx([14 / 3, 2.0, 3.0])


def test_a_device_that_changes_its_sub_model_speaks_for_both():
    given = [sent(0, 2.0, 2.0), sent(0, 4.0, submodel=FIRST), sent(1, 5.0, 4.0)]
    assert votes_of(given, torch.zeros(2), True).values.tolist() == [[3.0, 2.0], [5.0, 4.0]]


def test_krum_compares_what_both_have_trained():
    # On the first coordinate 0, 1 and the narrow one agree; 3 agrees with nobody.
    given = [
        sent(0, 1.0, 7.0),
        sent(1, 1.2, 7.2),
        sent(2, 1.1, submodel=FIRST),
        sent(3, -50.0, 7.1),
        sent(4, 1.3, 7.1),
    ]
    moved = robust(krum(1, selected=0))("main", torch.zeros(2), given, 1.0)
    assert 1.0 <= moved[0] <= 1.3
    assert 7.0 <= moved[1] <= 7.2


def test_krum_without_anything_in_common_moves_only_what_the_chosen_one_trained():
    value = torch.tensor([-0.0, 0.1])
    given = [sent(0, 3.0, submodel=SECOND), sent(1, 5.0, submodel=FIRST)]
    moved = robust(krum(0))("main", value, given, 1.0)
    assert moved.tolist() == pytest.approx([0.0, 3.1])
    assert torch.signbit(moved[0])  # bit for bit


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["robust-fedbuff", "robust-quorum"])
def test_what_nobody_trained_keeps_its_bits(name, rule):
    size = {"size": 5} if name == "robust-fedbuff" else {}
    start = torch.tensor([0.1, -0.0, 0.3])
    server = Server(start, build_strategy(name, {"rule": rule, **size}), TrainSpec())
    tasks = sends(server.handle(*(Joined(device, FIRST) for device in range(5))))
    server.handle(*(Arrived(t.device, Update(t.id, torch.tensor([1.0]), 1)) for t in tasks))
    head = server.store.head_params()
    assert head[0].item() == pytest.approx(1.1)
    assert head[1:].tolist() == start[1:].tolist()
    assert torch.signbit(head[1])


# One of five sends garbage, a hundred times as long as it should be and the other way.


def unbounded():
    return Checks(norm_ratio=1e9, examples_ratio=1e9)


def after_three_rounds(strategy):
    """All devices have an optimum near 1; the server's own bounds are out of the way."""
    server = Server(torch.zeros(2), strategy, TrainSpec(), unbounded())
    tasks = sends(server.handle(*map(Joined, range(5))))
    for _ in range(3):
        answers = []
        for task in tasks:
            honest = (1 + 0.02 * task.device - task.params) / 2
            delta = -100 * honest if task.device == 3 else honest
            examples = 10**9 if task.device == 3 else 10
            answers.append(Arrived(task.device, Update(task.id, delta, examples)))
        tasks = sends(server.handle(*answers))
    assert server.store.commits == 3
    assert server.accepted == 15
    return (server.store.head_params() - 1).abs().max().item()


@pytest.mark.parametrize("plain", [fedbuff(size=5), semi_async(quorum=1.0)])
def test_garbage_drags_the_mean_away(plain):
    assert after_three_rounds(plain) > 10


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "build",
    [
        lambda rule: build_strategy("robust-fedbuff", {"rule": rule, "size": 5}),
        lambda rule: build_strategy("robust-quorum", {"rule": rule, "quorum": 1.0}),
    ],
    ids=["buffer", "quorum"],
)
def test_garbage_does_not_drag_a_robust_one_away(build, rule):
    assert after_three_rounds(build(rule)) < (0.4 if rule == "clip" else 0.2)


def test_a_fast_device_does_not_outvote_the_others():
    server = Server(
        torch.zeros(1),
        build_strategy("robust-fedbuff", {"size": 6, "decay": "constant"}),
        TrainSpec(),
        unbounded(),
    )
    bad, *good = sends(server.handle(*map(Joined, range(4))))
    for _ in range(3):
        answer = Arrived(0, Update(bad.id, torch.tensor([-100.0]), 1))
        (bad,) = sends(server.handle(answer))
    server.handle(*(Arrived(t.device, Update(t.id, torch.tensor([1.0]), 1)) for t in good))
    assert server.store.head_params().item() == 1.0


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"rule": "mode"}, "rule"),
        ({"trim": 0.5}, "trim"),
        ({"byzantine": -1}, "byzantine"),
        ({"bound": -1.0}, "bound"),
        ({"rule": "krum", "byzantine": 2, "size": 6}, "size: 6: .* = 7"),
        ({"rule": "trimmed-mean", "trim": 0.1, "size": 9}, "trim"),
    ],
)
def test_a_bad_option_is_named(options, key):
    with pytest.raises(BadInput, match=key):
        build_strategy("robust-fedbuff", options)


def test_the_same_as_flower():
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    rows = np.random.default_rng(5).normal(size=(11, 7)).astype(np.float32)
    rows[4] *= 50
    results = [([row.copy()], 1) for row in rows]
    ours = votes(*rows.tolist())
    for rule, theirs in [
        (median, flower.aggregate_median(results)),
        (trimmed_mean(0.2), flower.aggregate_trimmed_avg(results, 0.2)),
        (krum(2), flower.aggregate_krum(results, 2, 0)),
        (krum(2, selected=4), flower.aggregate_krum(results, 2, 4)),
    ]:
        assert rule(ours)[0].tolist() == pytest.approx(theirs[0].tolist(), rel=1e-5, abs=1e-6)

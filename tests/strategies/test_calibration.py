"""The shift of the output bias, by hand and through a server."""

import math

import pytest
import torch
from torch import nn

from commands import logged, sends
from latecomer.core.codec import decode, encode
from latecomer.core.messages import Arrived, Failed, Joined, Left, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.device.flat import FlatModel
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.calibration import (
    MAX_SHIFT,
    MIN_ARRIVALS,
    Calibration,
    LabelReport,
    bias_shift,
    label_skew,
)
from latecomer.strategies.latecomer.measured_step import MeasuredStep
from latecomer.strategies.parts.clustering import Clustering

ALL = torch.ones(2, dtype=torch.float64)


def report(share, mean=None, variance=None, examples=100.0):
    mean = share if mean is None else mean
    variance = [0.2] * len(share) if variance is None else variance
    values = (torch.tensor(v, dtype=torch.float64) for v in (mean, share, variance))
    return LabelReport(examples, *values)


def test_label_skew_by_hand():
    apart = [report([1.0, 0.0]), report([0.0, 1.0])]
    assert label_skew(apart).tolist() == pytest.approx([1.0, 1.0])
    assert label_skew([report([0.7, 0.3])] * 2).tolist() == [0.0, 0.0]
    # A quarter of each would have to move, half would be the most. Of a hundred throws of a coin,
    # heads fall short of half by 51 * C(100, 51) / 2^101 / 100 on average, beside 0.25, and of
    # the mean of two such by sqrt(1 / 2) of that.
    found = label_skew([report([0.75, 0.25]), report([0.25, 0.75])])
    chance = math.sqrt(1 / 2) * 51 * math.comb(100, 51) / 2**101 / 100 / 0.25
    assert found.tolist() == pytest.approx([(0.5 - chance) / (1 - chance)] * 2)


def test_one_class_can_be_skewed_among_others():
    """One device of four has the second class, and makes up for it by the first."""
    shares = [[0.1, 0.4, 0.5], *[[0.5, 0.0, 0.5]] * 3]
    found = label_skew([report(share, examples=1e12) for share in shares])
    # Three quarters of the second would have to move, 0.9 would be the most.
    assert found.tolist() == pytest.approx([0.75 / 4 / 0.6, 0.75 / 0.9, 0.0], abs=1e-5)


def test_sampling_few_examples_is_no_skew():
    rng = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    drawn = [torch.multinomial(chances, 20, True, generator=rng) for _ in range(300)]
    shares = [torch.bincount(labels, minlength=4) / 20 for labels in drawn]
    found = label_skew([report(share.tolist(), examples=20.0) for share in shares])
    assert found.max() < 0.1
    assert label_skew([report(s, examples=1.0) for s in ([1.0, 0.0], [0.0, 1.0])]).max() == 0.0


def test_a_single_class_is_not_skewed():
    assert label_skew([report([1.0, 0.0]), report([1.0, 0.0])]).tolist() == [0.0, 0.0]


def test_shifts_by_hand():
    one = report([1.0, 0.0], mean=[0.8, 0.2], variance=[0.16, 0.16], examples=50.0)
    other = report([0.0, 1.0], mean=[0.4, 0.6], variance=[0.24, 0.24], examples=50.0)
    # The gap is (-0.2 + 0.4) / 2 = 0.1 for the second class, -0.1 for the first; one nat gives
    # 0.2, and five prior examples to a hundred damp it: 0.1 / (0.2 + 0.05), and half of that
    # because one class gains what the other loses.
    assert bias_shift([one, other], ALL).tolist() == pytest.approx([-0.2, 0.2])


def test_one_class_is_shifted_alone():
    """The first two of three classes are predicted too often and too seldom, the third is right."""
    reports = [report([0.2, 0.5, 0.3], mean=[0.5, 0.2, 0.3], variance=[0.2] * 3, examples=50.0)] * 2
    only = [torch.tensor([float(k == j) for j in range(3)]).double() for k in range(3)]
    # The second gap is 0.3; one nat gives 0.2, and five prior examples to a hundred damp it.
    assert bias_shift(reports, only[0]).tolist() == pytest.approx([-1.2, 0.0, 0.0])
    assert bias_shift(reports, 0.5 * only[1]).tolist() == pytest.approx([0.0, 0.6, 0.0])
    assert bias_shift(reports, only[2]).tolist() == [0.0, 0.0, 0.0]  # whatever the other gaps
    # All together: two thirds of that each, since one gains what the others lose.
    found = bias_shift(reports, torch.ones(3).double())
    assert found.tolist() == pytest.approx([-0.8, 0.8, 0.0])


def test_the_gap_is_closed():
    """Devices with one of two classes each, and a model whose first output is one nat too high."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(4000) % 2
    logits = torch.randn(4000, 2, generator=rng, dtype=torch.float64)
    logits[torch.arange(4000), labels] += 1.0  # better than chance
    logits[:, 0] += 1.0

    def reports_with(shift):
        p = (logits + shift).softmax(1)
        return [
            LabelReport(
                2000.0, p[rows].mean(0), torch.eye(2).double()[k], (p[rows] * (1 - p[rows])).mean(0)
            )
            for k in (0, 1)
            for rows in [labels == k]
        ]

    def gap(reports):
        return sum((each.class_share - each.mean_prediction)[0].item() for each in reports) / 2

    found = reports_with(torch.zeros(2))
    assert gap(found) < -0.1
    assert abs(gap(reports_with(bias_shift(found, ALL)))) < 0.1 * abs(gap(found))


def test_without_a_gap_nothing_is_shifted():
    assert bias_shift([report([1.0, 0.0]), report([0.0, 1.0])], ALL).tolist() == [0.0, 0.0]


def test_shifts_are_bounded():
    classes = torch.eye(10).tolist()
    never = [report(s, mean=classes[0], variance=[0.0] * 10) for s in classes]
    found = bias_shift(never, torch.ones(10).double())
    assert found[0] == -MAX_SHIFT
    assert 0 < found[1:].min() <= found[1:].max() <= MAX_SHIFT


def test_no_device_weighs_more_than_twice_the_median():
    exact = [report(s) for s in ([1.0, 0.0], [0.0, 1.0])] * 10
    shifts = [
        bias_shift([*exact, report([1.0, 0.0], mean=[0.0, 1.0], examples=n)], ALL)
        .abs()
        .max()
        .item()
        for n in (1e3, 1e9)
    ]
    assert shifts[0] == pytest.approx(shifts[1])


def test_the_number_of_examples_counts_up_to_twice_the_median():
    one, other = report([1.0, 0.0], mean=[0.8, 0.2]), report([0.0, 1.0], mean=[0.2, 0.8])
    large = report([1.0, 0.0], mean=[0.8, 0.2], examples=10_000.0)
    # Gaps of 0.2 and -0.2 with 100 + 200 and 100 examples: 0.1 / (0.2 + 5 / 400), and half of it
    # because one class gains what the other loses.
    shift = 0.5 * 0.1 / (0.2 + 5 / 400)
    assert bias_shift([one, other, large], ALL).tolist() == pytest.approx([shift, -shift])


class NoCommits:
    """Merge: never commits."""

    def add(self, contribution, view):
        return None

    def settle(self, view):
        return ()


def two_devices(strength=1.0, bias=True, merge=None):
    """A server of a network with two outputs, and its first commands to two devices."""
    network = FlatModel(lambda: nn.Linear(1, 2, bias=bias), (1,), 2)
    clustering = Clustering(1, 4, 20, passes=3.0, partial=False, feedback_every=3)
    calibration = Calibration(strength, clustering)
    strategy = Strategy(
        route=clustering,
        merge=merge or CachedAggregation(0.5, MeasuredStep()),
        observers=(calibration,),
    )
    size, spec = network.layout.size, TrainSpec()
    server = Server(torch.zeros(size), strategy, spec, networks=lambda submodel: network)
    return server, server.handle(Joined(0), Joined(1))


def answer(server, tasks, shares, times=MIN_ARRIVALS):
    """The devices report these shares of the first class, and a model that predicts 0.7 of it.

    Returns the last tasks and the reasons logged.
    """
    reasons = []
    for _ in range(times):
        arrivals = []
        for task in tasks:
            share = shares[task.device]
            metrics = {"error": 0.1, "soft_0": 0.7, "soft_1": 0.3, "sway_0": 0.2, "sway_1": 0.2}
            metrics |= {"share_0": share, "share_1": 1 - share}
            update = Update(task.id, torch.zeros_like(task.params), 50, metrics)
            arrivals.append(Arrived(task.device, update))
        commands = server.handle(*arrivals)
        tasks = sends(commands)
        reasons += [fields["reason"] for fields in logged(commands, "switch")]
    return tasks, reasons


def test_the_model_of_devices_with_one_class_each_is_calibrated():
    server, commands = two_devices()
    assert server.model() is server.store.head_params()
    tasks, reasons = answer(server, sends(commands), (1.0, 0.0))
    assert ["calibration of classes 0, 1" in reason for reason in reasons] == [True]
    # The gap of the second class is 0.2: 0.2 / (0.2 + 5 / 100), half of it, and its skew is 1.
    assert server.model().tolist() == pytest.approx([0.0, 0.0, -0.4, 0.4])
    settings = server.serving_settings("main")
    assert settings.output_bias == pytest.approx((-0.4, 0.4))
    assert server.store.head_params().tolist() == [0.0] * 4  # the trained model is unchanged
    again, _ = two_devices()
    again.restore(decode(*encode(server.state())))
    assert again.model().tolist() == server.model().tolist()
    _, reasons = answer(server, tasks, (0.5, 0.5))
    assert ["calibration ends" in reason for reason in reasons] == [True]
    assert server.model() is server.store.head_params()


def test_half_the_strength_is_half_the_shift():
    server, commands = two_devices(strength=0.5)
    answer(server, sends(commands), (1.0, 0.0))
    assert server.model().tolist() == pytest.approx([0.0, 0.0, -0.2, 0.2])


@pytest.mark.parametrize("options", [{"strength": 0.0}, {"bias": False}])
def test_without_strength_or_an_output_bias_the_model_is_unchanged(options):
    server, commands = two_devices(**options)
    _, reasons = answer(server, sends(commands), (1.0, 0.0))
    assert not reasons
    assert server.model() is server.store.head_params()
    assert server.serving_settings("main").output_bias == ()


def test_reports_about_the_initial_model_are_ignored():
    server, commands = two_devices(merge=NoCommits())
    _, reasons = answer(server, sends(commands), (1.0, 0.0))
    assert not reasons


def test_reports_of_devices_that_are_long_gone_are_ignored():
    server, commands = two_devices()
    tasks, _ = answer(server, sends(commands), (1.0, 0.0))
    server.handle(Failed(server.working[1], "lost"), Left(1))
    # Three fleet passes of two devices; a single report gives no shift.
    tasks, _ = answer(server, [task for task in tasks if task.device == 0], (1.0, 0.0), 6)
    assert server.model() is not server.store.head_params()
    answer(server, tasks, (1.0, 0.0), 2)  # a commit, for which it is computed anew
    assert server.model() is server.store.head_params()

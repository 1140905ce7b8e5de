"""When devices interpolate with their local updates, and which updates are kept for that."""

import pytest
import torch
from latecomer.strategies.latecomer.personalisation import Personalisation, dispersion

from commands import logged, sends
from latecomer.core.codec import decode, encode
from latecomer.core.messages import Arrived, Contribution, Joined, Left, Task, TrainSpec, Update
from latecomer.core.server import Server
from latecomer.core.strategy import Strategy
from latecomer.strategies.latecomer.cached_aggregation import CachedAggregation
from latecomer.strategies.latecomer.calibration import MIN_ARRIVALS, Calibration
from latecomer.strategies.parts.clustering import Clustering


def test_dispersion_by_hand():
    # Mean 0.5: 10 * 0.04 + 10 * 0.04 over 0.25 * 1.
    assert dispersion([(0.3, 10), (0.7, 10)]) == pytest.approx(3.2)
    assert dispersion([(0.5, 10), (0.5, 30)]) == 0.0
    assert dispersion([(0.0, 10), (0.0, 30)]) == 0.0


def test_no_device_decides_alone_whether_devices_differ():
    similar = [(0.1, 30)] * 20
    assert dispersion([*similar, (0.0, 10**9)]) < 2 * dispersion([*similar, (0.0, 300)]) < 4


def two_devices(interpolation=0.5):
    """A server with two devices, its personalisation, and its first commands."""
    clustering = Clustering(1, 4, 20, passes=3.0, partial=False, feedback_every=3)
    calibration = Calibration(0.0, clustering)
    strategy = Strategy(
        route=clustering,
        merge=CachedAggregation(0.5, 1.0, 0.0),
        observers=(Personalisation(interpolation, 1.0, calibration, None), calibration),
    )
    server = Server(torch.zeros(1), strategy, TrainSpec())
    return server, server.strategy.serving, server.handle(Joined(0), Joined(1))


def answer(server, commands, errors, times):
    """Both devices answer with these error rates; the last commands, and the reasons logged."""
    reasons = []
    for _ in range(times):
        metrics = {"soft_0": 0.25, "soft_1": 0.75}
        arrivals = [
            Arrived(
                t.device,
                Update(t.id, torch.tensor([0.5]), 100, {"error": errors[t.device], **metrics}),
            )
            for t in sends(commands)
        ]
        commands = server.handle(*arrivals)
        reasons += [fields["reason"] for fields in logged(commands, "switch")]
    return commands, reasons


def test_devices_interpolate_while_their_error_rates_differ():
    server, serving, commands = two_devices()
    assert serving.interpolation == 0.0
    commands, reasons = answer(server, commands, (0.1, 0.4), MIN_ARRIVALS)
    assert serving.interpolation == server.serving_settings("main").interpolation == 0.5
    assert ["differ" in reason for reason in reasons] == [True]
    _, reasons = answer(server, commands, (0.2, 0.2), MIN_ARRIVALS)
    assert serving.interpolation == server.serving_settings("main").interpolation == 0.0
    assert ["similar" in reason for reason in reasons] == [True]


def test_interpolation_begins_at_a_dispersion_of_2_5_and_ends_below_1_5():
    """Of rates (1 - d) / 2 and (1 + d) / 2 over 100 examples each the dispersion is 200 d^2."""
    server, serving, commands = two_devices()
    for d, interpolation in [(0.11, 0), (0.113, 0.5), (0.088, 0.5), (0.085, 0), (0.11, 0)]:
        errors = (0.5 - d / 2, 0.5 + d / 2)
        commands, _ = answer(server, commands, errors, MIN_ARRIVALS)
        assert serving.interpolation == interpolation


def test_error_rates_above_1_are_ignored():
    server, serving, commands = two_devices()
    answer(server, commands, (0.1, 100.0), MIN_ARRIVALS)
    assert serving.interpolation == 0.0


def test_mean_predictions_over_another_number_of_classes_are_ignored():
    server, serving, commands = two_devices()
    answer(server, commands, (0.1, 0.1), 1)
    assert serving.class_prior([0, 1], classes=3) is None


def test_an_older_update_that_arrives_late_does_not_replace_a_newer_one():
    server, serving, _ = two_devices()
    for number, value in ((2, 0.5), (1, 9.0)):
        task = Task(number, 0, number, "main", 0, TrainSpec(), torch.zeros(1))
        update = Update(number, torch.tensor([value]), 1)
        contribution = Contribution(task, update, torch.zeros(1), update.delta, "main", 0)
        serving.on_contribution(contribution, server)
    assert serving.local_update(0).tolist() == [0.5]


def test_the_update_of_a_device_that_left_is_kept():
    server, serving, commands = two_devices()
    answer(server, commands, (0.2, 0.2), 1)
    server.handle(Left(1))
    assert serving.local_update(1).tolist() == [0.5]
    assert serving.local_update(2) is None
    assert serving.class_prior([0, 1], 2).tolist() == [0.25, 0.75]
    assert serving.class_prior([2], 2) is None


def test_without_interpolation_no_update_is_kept():
    server, serving, commands = two_devices(interpolation=0.0)
    answer(server, commands, (0.2, 0.2), 1)
    assert serving.local_update(0) is None


@pytest.mark.parametrize("private", [{"noise_std": 1.0}, {"epsilon": 1.0}])
def test_private_updates_are_not_kept(private):
    server, serving, commands = two_devices()
    task = sends(commands)[0]
    server.handle(Arrived(task.device, Update(task.id, torch.ones(1), 1, **private)))
    assert serving.local_update(task.device) is None


def test_a_restored_server_personalises_in_the_same_way():
    server, serving, commands = two_devices()
    answer(server, commands, (0.1, 0.4), MIN_ARRIVALS)
    again, restored, _ = two_devices()
    again.restore(decode(*encode(server.state())))
    assert restored.interpolation == 0.5
    assert restored.local_update(0).tolist() == serving.local_update(0).tolist() == [0.5]
    assert again.serving_settings("main") == server.serving_settings("main")

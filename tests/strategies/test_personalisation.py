"""The class prior of a model, from the shares that devices report, and its way to the devices."""

import pytest
import torch

from commands import sends
from latecomer.core.codec import decode, encode
from latecomer.core.messages import Arrived, Joined, ServingSettings, TrainSpec, Update
from latecomer.core.strategy import Strategy
from latecomer.strategies.parts.dispatching import OneLineageEach
from latecomer.strategies.parts.personalisation import personalised
from latecomer.strategies.recipe import build_strategy
from toy import SIZE, server_of

PLAIN = Strategy()


def by_device(contribution, view):
    return f"device-{contribution.task.device}"


def begun(devices=3, prior=True, finetune_epochs=0):
    server = server_of(personalised(PLAIN, prior, finetune_epochs))
    return server, {t.device: t for t in sends(server.handle(*map(Joined, range(devices))))}


def report(server, tasks, device, *shares, examples=1):
    metrics = {f"share_{j}": share for j, share in enumerate(shares)}
    update = Update(tasks[device].id, torch.zeros(SIZE), examples, metrics)
    tasks.update({t.device: t for t in sends(server.handle(Arrived(device, update)))})


def test_the_class_prior_is_the_mean_share_weighted_by_examples():
    server, tasks = begun()
    assert server.serving_settings("main") == ServingSettings(prior=True)  # uniform
    report(server, tasks, 0, 1.0, 0.0, examples=3)
    report(server, tasks, 1, 0.2, 0.8, examples=1)
    assert server.serving_settings("main").class_prior == pytest.approx((0.8, 0.2))
    report(server, tasks, 0, 0.2, 0.8, examples=9)  # replaces its first
    assert server.serving_settings("main").class_prior == pytest.approx((0.2, 0.8))


def test_the_class_prior_is_that_of_the_devices_of_the_lineage():
    strategy = Strategy(route=by_device, dispatch=OneLineageEach())
    server = server_of(personalised(strategy, prior=True))
    tasks = {t.device: t for t in sends(server.handle(*map(Joined, range(2))))}
    report(server, tasks, 0, 1.0, 0.0)
    report(server, tasks, 1, 0.0, 1.0)
    assert server.serving_settings("main").class_prior == ()
    assert server.serving_settings("device-0").class_prior == (1.0, 0.0)
    assert server.serving_settings("device-1").class_prior == (0.0, 1.0)


@pytest.mark.parametrize("shares", [(0.5, 0.6), (-0.5, 1.5), (1.0,), ()])
def test_shares_that_are_no_distribution_are_ignored(shares):
    server, tasks = begun()
    report(server, tasks, 0, 0.3, 0.7)
    report(server, tasks, 1, *shares, examples=100)
    assert server.serving_settings("main").class_prior == pytest.approx((0.3, 0.7))


def test_shares_of_different_numbers_of_classes_give_a_uniform_prior():
    server, tasks = begun()
    report(server, tasks, 0, 0.3, 0.7)
    report(server, tasks, 1, 0.3, 0.3, 0.4)
    assert server.serving_settings("main").class_prior == ()


def test_switched_off_the_strategy_is_unchanged():
    assert personalised(PLAIN) is PLAIN


def test_fine_tuning_alone_asks_for_no_shares():
    server, tasks = begun(finetune_epochs=2, prior=False)
    report(server, tasks, 0, 0.3, 0.7)
    assert server.serving_settings("main") == ServingSettings(finetune_epochs=2)
    assert not tasks[0].spec.report_shares


def test_with_the_prior_devices_report_their_shares():
    _, tasks = begun()
    assert tasks[0].spec.report_shares
    spec = personalised(build_strategy("echopfl"), prior=True).prepare(TrainSpec())
    assert spec.report_shares
    assert spec.feedback  # what the strategy itself asks for stays


def test_a_restored_server_gives_the_same_settings():
    server, tasks = begun(finetune_epochs=1)
    report(server, tasks, 0, 0.3, 0.7)
    again, _ = begun(finetune_epochs=1)
    again.restore(decode(*encode(server.state())))
    expected = ServingSettings(prior=True, finetune_epochs=1, class_prior=(0.3, 0.7))
    assert again.serving_settings("main") == server.serving_settings("main") == expected

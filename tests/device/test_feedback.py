"""Feedback metrics of an update, worked out by hand."""

import math

import pytest
import torch
from torch import nn

from latecomer.core.messages import MAIN, Offer, Task, TrainSpec
from latecomer.device import feedback as module
from latecomer.device.client import Client
from latecomer.device.feedback import chi_squared, feedback, frequencies
from latecomer.device.flat import FlatModel
from latecomer.device.privacy import Privacy, per_release_multiplier

# Outputs are the inputs themselves: a row of logarithms is a soft label.
MIRROR = FlatModel(lambda: nn.Linear(3, 3), (3,), 3)
SAME = torch.cat([torch.eye(3).reshape(-1), torch.zeros(3)])


def rows(*soft):
    return torch.tensor(soft).log()


def test_every_class_is_given_an_example_more():
    found = frequencies(torch.tensor([0, 0, 2]), 3)
    assert found.tolist() == pytest.approx([3 / 6, 1 / 6, 2 / 6])


def test_chi_squared_by_hand():
    """All are of class 0 and are taken for class 1: (1, 3, 1) / 5 against (3, 1, 1) / 5."""
    observed, expected = (frequencies(torch.tensor([c, c]), 3) for c in (1, 0))
    assert chi_squared(observed, expected) == pytest.approx(0.16 / 0.6 + 0.16 / 0.2)
    assert chi_squared(expected, expected) == 0


def test_feedback_error_and_soft_labels_by_hand():
    x = rows([0.8, 0.1, 0.1], [0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.2, 0.6, 0.2])
    found = feedback(MIRROR, SAME, x, torch.tensor([0, 1, 1, 2]))
    # Predicted (2, 2, 0), actual (1, 2, 1), each with one more: (3, 3, 1) and (2, 3, 2) of 7.
    chi2 = 2 * (1 / 7) ** 2 / (2 / 7)
    # Across classes 0.8, 0.1, 0.1 has the variance 49 / 450, and 0.2, 0.6, 0.2 has 16 / 450.
    assert found["feedback"] == pytest.approx(chi2 * 65 / 900)
    assert found["feedback"] == pytest.approx(13 / 1260)
    assert found["error"] == 0.5
    soft = [found[f"soft_{j}"] for j in range(3)]
    assert soft == pytest.approx([0.5, 0.35, 0.15])
    assert set(found) == {"feedback", "error", "soft_0", "soft_1", "soft_2"}


def test_an_untrained_model_gets_no_feedback_however_wrong():
    """Nearly uniform soft labels have hardly a variance: that is what the factor is for."""
    x = torch.tensor([[0.0, 0.01, 0.0]] * 4)
    untrained = feedback(MIRROR, SAME, x, torch.zeros(4, dtype=torch.int64))
    trained = feedback(MIRROR, SAME, 1000 * x, torch.zeros(4, dtype=torch.int64))
    assert untrained["error"] == trained["error"] == 1
    assert untrained["feedback"] < 1e-4 * trained["feedback"]


def test_a_device_that_lacks_classes_divides_by_no_zero():
    found = feedback(MIRROR, SAME, rows([0.1, 0.8, 0.1]), torch.tensor([0]))
    assert all(math.isfinite(value) for value in found.values())


def test_large_data_are_looked_at_in_parts(monkeypatch):
    x, y = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3
    whole = feedback(MIRROR, SAME, x, y)
    monkeypatch.setattr(module, "MAX_EXAMPLES_AT_ONCE", 2)
    assert feedback(MIRROR, SAME, x, y) == pytest.approx(whole)


# On a device: feedback is computed on validation examples, which it does not train on.

SPEC = TrainSpec(local_epochs=2, batch_size=4, lr=0.5, feedback=True)


def client(examples=20, privacy=None):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(examples, 3, generator=generator)
    y = torch.randint(0, 3, (examples,), generator=generator)
    return Client(0, MIRROR, x, y, seed=2, privacy=privacy)


def task(spec=SPEC, **more):
    return Task(0, 0, 0, MAIN, 0, spec, SAME.clone(), **more)


def test_a_fifth_is_held_back_and_the_rest_is_trained_on():
    trained, held = client().train_validation_split(20)
    assert (len(trained), len(held)) == (16, 4)
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(20))
    plan = client().plan(task())
    assert set(plan.order.flatten().tolist()) == set(trained.tolist())
    assert plan.mask.sum() == 2 * 16


def test_with_fewer_than_five_all_examples_serve_both():
    trained, held = client(4).train_validation_split(4)
    assert sorted(trained.tolist()) == sorted(held.tolist()) == [0, 1, 2, 3]


def test_feedback_is_of_the_validation_examples_and_the_delta_of_the_others():
    one = client()
    _, held = one.train_validation_split(20)
    update = one.perform(task())
    judged = feedback(MIRROR, SAME, one.x[held], one.y[held])
    assert update.metrics == judged
    other = client()
    other.y = one.y.clone()
    other.y[held] = one.x[held].argmax(1)
    again = other.perform(task())
    assert torch.equal(again.delta, update.delta)
    assert again.metrics["error"] == 0 < update.metrics["error"]


def test_without_feedback_all_examples_are_trained_on():
    plan = client().plan(task(TrainSpec(local_epochs=1, batch_size=4)))
    assert sorted(plan.order.flatten().tolist()) == list(range(20))


def test_looking_costs_a_third_of_training():
    """16 trained on twice; 4 looked at for the feedback, and once for each of two models."""
    plain, asked = task(), task(offers=(Offer("other", 1, SAME.clone()),))
    assert client().examples(plain) == pytest.approx(2 * 16 + 4 / 3)
    assert client().examples(asked) == pytest.approx(2 * 16 + 3 * 4 / 3)


def test_the_loss_of_every_offered_model_is_sent():
    worse = Offer("other", 1, -SAME)
    update = client().perform(task(offers=(worse,)))
    x, y = client().validation_data(task())
    for number, params in enumerate((SAME, -SAME)):
        loss = nn.functional.cross_entropy(MIRROR.logits(params, x), y).item()
        assert update.metrics[f"loss_{number}"] == pytest.approx(loss, rel=1e-5)
    losses = [update.metrics["loss_0"], update.metrics["loss_1"]]
    assert update.choice == losses.index(min(losses))


def test_no_loss_is_sent_without_offers():
    assert not any(name.startswith("loss") for name in client().perform(task()).metrics)


def test_class_shares_are_those_of_all_examples():
    device = client()
    update = device.perform(task(TrainSpec(2, 4, 0.5, report_shares=True)))
    counts = torch.bincount(device.y, minlength=3)
    assert update.metrics == {f"share_{j}": pytest.approx(n / 20) for j, n in enumerate(counts)}
    plain = device.perform(task(TrainSpec(2, 4, 0.5)))
    assert plain.metrics == {}
    assert torch.equal(update.delta, plain.delta)


def test_a_private_device_sends_no_feedback_and_takes_no_newer_model():
    privacy = Privacy("gaussian", per_release_multiplier(1.0, 1e-5), clip=1.0, delta=1e-5)
    better = Offer("other", 1, 5 * SAME)
    asked = task(offers=(better,), broadcasts=(Offer(MAIN, 2, 2 * SAME),))
    update = client(privacy=privacy).perform(asked, rebases=((0, 2),))
    plain = client(privacy=privacy).perform(task(TrainSpec(2, 4, 0.5)))
    assert update.metrics == {}
    assert update.choice == 0
    assert torch.equal(update.delta, plain.delta)
    assert client(privacy=privacy).examples(asked) == 2 * 20


def test_while_data_grow_no_example_changes_its_part():
    """A training example never becomes a validation example, or the reverse."""
    device = client(50)
    kept, held = (set(part.tolist()) for part in device.train_validation_split(50))
    for n in (50, 33, 12, 7):
        some, others = (set(part.tolist()) for part in device.train_validation_split(n))
        if some != others:
            assert some <= kept
            assert others <= held
        assert some | others == set(range(n))

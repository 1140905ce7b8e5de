"""Objectives: the loss of each example, missing targets, shapes, and losses of the user's own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from latecomer.core.messages import ServingSettings, Task, TrainSpec
from latecomer.device.client import Client
from latecomer.device.flat import FlatModel, flat_model
from latecomer.device.kernel import compiled_kernel
from latecomer.device.objective import Objective, classification, make_objective
from latecomer.device.personalisation import personalise
from latecomer.device.training import (
    Plan,
    average_loss,
    local_update,
    losses,
    plan_batches,
    reason_not_to_batch,
)
from latecomer.errors import BadInput
from problems import KINDS, NAN, a_problem, huber, inputs, mean_huber

SPEC = TrainSpec(local_epochs=2, batch_size=8, lr=0.1, momentum=0.5)


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_training_reduces_the_loss(kind):
    model, x, y = a_problem(kind)
    params = model.init(1)
    plan = plan_batches(len(x), replace(SPEC, local_epochs=30), torch.Generator().manual_seed(1))
    trained = local_update(model, params, x, y, SPEC, plan)
    before, after = (average_loss(model, each, x, y) for each in (params, trained))
    assert after < 0.7 * before


@every_kind
def test_a_batch_of_tasks_gives_what_each_gives_alone(kind):
    model, x, y = a_problem(kind)
    assert reason_not_to_batch(model) is None
    params = model.init(1)
    plans = [plan_batches(len(x), SPEC, torch.Generator().manual_seed(s)) for s in (1, 2)]

    def train(order, mask):
        return local_update(model, params, x, y, SPEC, Plan(order, mask), functional=True)

    orders, masks = (torch.stack(parts) for parts in zip(*plans, strict=True))
    together = torch.func.vmap(train)(orders, masks)
    for plan, found in zip(plans, together, strict=True):
        alone = local_update(model, params, x, y, SPEC, plan)
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


@every_kind
def test_clipping_bounds_each_example(kind):
    model, x, y = a_problem(kind)
    params, one = model.init(1), TrainSpec(1, 4, lr=1.0, momentum=0.0, clip=1e-3)
    plan = Plan(torch.arange(4).view(1, 4), torch.ones(1, 4))
    moved = local_update(model, params, x, y, one, plan) - params
    # Computed example by example.
    expected = torch.zeros_like(params)
    for i in range(4):
        gradient = torch.func.grad(
            lambda at, i=i: model.objective.mean(model.logits(at, x[i : i + 1]), y[i : i + 1])
        )(params)
        expected -= gradient * min(1.0, 1e-3 / max(gradient.norm().item(), 1e-30)) / 4
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-7)


@every_kind
def test_the_mean_is_that_of_the_examples(kind):
    model, x, y = a_problem(kind)
    outputs, objective = model.logits(model.init(1), x), model.objective
    each = objective.losses(outputs, y)
    assert each.shape == (len(x),)
    torch.testing.assert_close(objective.mean(outputs, y), each.mean())
    torch.testing.assert_close(objective.sum(outputs, y), each.sum())
    weights = torch.arange(len(x)).float()
    weighted = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(objective.mean(outputs, y, weights), weighted)
    assert objective.mean(outputs, y, torch.zeros(len(x))) == 0
    torch.testing.assert_close(losses(model, model.init(1), x, y), each.double())


def test_losses_are_those_of_torch():
    out, y = torch.randn(6, 3), torch.randn(6, 3)
    bits = (y > 0).float()
    for name, targets, expected in (
        ("mse", y, F.mse_loss(out, y, reduction="none").mean(1)),
        ("mae", y, F.l1_loss(out, y, reduction="none").mean(1)),
        (
            "binary-cross-entropy",
            bits,
            F.binary_cross_entropy_with_logits(out, bits, reduction="none").mean(1),
        ),
    ):
        found = make_objective(name, 3, (3,)).losses(out, targets)
        torch.testing.assert_close(found, expected)
    tokens = torch.tensor([[0, 2], [1, -100]])
    logits = torch.randn(2, 2, 3)
    found = make_objective("cross-entropy", 3, (2,)).losses(logits, tokens)
    expected = [
        F.cross_entropy(logits[0], tokens[0]),
        F.cross_entropy(logits[1, :1], tokens[1, :1]),
    ]
    torch.testing.assert_close(found, torch.stack(expected))


def test_missing_targets_have_no_part_in_loss_and_gradient():
    objective = make_objective("binary-cross-entropy", 2, (2,))
    outputs = torch.tensor([[1.0, 5.0], [2.0, -3.0]], requires_grad=True)
    targets = torch.tensor([[1.0, NAN], [NAN, NAN]])
    found = objective.losses(outputs, targets)
    expected = F.binary_cross_entropy_with_logits(torch.tensor(1.0), torch.tensor(1.0)).item()
    assert found.tolist() == pytest.approx([expected, 0.0])
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert gradient.isfinite().all()
    assert (gradient != 0).tolist() == [[True, False], [False, False]]


def test_one_output_fits_targets_of_one_number():
    objective = make_objective("mse", 1)
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])
    assert objective.losses(outputs, targets).tolist() == [0.0, 4.0]  # not (2, 2) by broadcasting


def test_a_mean_cannot_be_weighted_and_is_computed_one_by_one():
    x, w = inputs()
    y = x @ w
    objective = replace(make_objective(mean_huber, 3, (3,)), per_example=False)
    model = flat_model("mlp", (5,), 3, (8,), objective=objective)
    own = flat_model("mlp", (5,), 3, (8,), objective=make_objective(huber, 3, (3,)))
    params = model.init(1)
    torch.testing.assert_close(losses(model, params, x, y), losses(own, params, x, y))
    assert "mean over the batch" in reason_not_to_batch(model)
    plan = plan_batches(len(x), SPEC, torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        local_update(model, params, x, y, SPEC, plan), local_update(own, params, x, y, SPEC, plan)
    )


def test_kinds_follow_from_the_loss_and_the_targets():
    assert make_objective("cross-entropy", 4) == classification(4)
    assert make_objective("cross-entropy", 4, (7,)).kind == "tokens"
    assert make_objective(huber, 4).kind == "own"
    assert make_objective(F.cross_entropy, 4, kind="classes").classifies
    assert make_objective("torch.nn.functional:huber_loss", 4).function is F.huber_loss


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        ("cross-entrpy", "auto", "'cross-entrpy' is unknown; did you mean 'cross-entropy'"),
        ("mse", "classes", "objective.kind = 'classes': mse is for regression"),
        ("nowhere:loss", "auto", "cannot import 'nowhere'"),
    ],
)
def test_unknown_losses(loss, kind, message):
    with pytest.raises(BadInput, match=message):
        make_objective(loss, 3, kind=kind)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: (out - y).sum().item(), "gave a float; it must give a tensor of shape"),
        (lambda out, y: out - y, r"gave shape \(40, 3\); it must give a tensor of shape \(\) or"),
        (lambda out, y: (out * NAN).mean(), "gives NaN for the initial model on the first 40"),
        (lambda out, y: (out / 0 - y).abs().mean(), "gives infinity for the initial model"),
        (lambda out, y: (out.detach() - y).mean(), "does not depend on the network"),
        (lambda out, y: F.nll_loss(out, y), r"calling it failed with outputs \(40, 3\) and"),
    ],
)
def test_unusable_losses_of_the_user(loss, message):
    x, w = inputs()
    out = (x @ w).requires_grad_()
    with pytest.raises(BadInput, match=message):
        make_objective(loss, 3, (3,)).check(out, x @ w)


@pytest.mark.parametrize(("loss", "per_example"), [(huber, True), (mean_huber, False)])
def test_the_check_finds_out_whether_a_loss_is_a_mean(loss, per_example):
    x, w = inputs()
    found = make_objective(loss, 3, (3,)).check((x @ w).requires_grad_(), x @ w)
    assert found.per_example == per_example


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (make_objective("mse", 2, (2,)), r"numbers of shape \(n, 2\), but gave \(2, 3\)"),
        (make_objective("mse", 1), r"numbers of shape \(n,\) or \(n, 1\), but gave \(2, 3\)"),
        (
            make_objective("cross-entropy", 4, (7,)),
            r"logits of shape \(n, 7, 4 or more tokens\), but gave",
        ),
        (classification(2), r"logits of shape \(n, 2\), but gave \(2, 3\) for a batch of 2"),
    ],
)
def test_networks_of_other_shapes_are_refused(objective, message):
    with pytest.raises(BadInput, match=message):
        FlatModel(lambda: nn.Linear(5, 3), (5,), objective.outputs, objective)


def test_with_an_own_loss_outputs_may_have_any_shape():
    objective = make_objective(lambda out, y: out.flatten(1).mean(1), 2)
    assert FlatModel(lambda: nn.Linear(5, 9), (5,), 2, objective).objective is objective


@every_kind
def test_only_classes_have_feedback_shares_and_a_prior(kind):
    model, x, y = a_problem(kind)
    spec = replace(SPEC, feedback=True, report_shares=True, report_loss=True)
    update = Client(0, model, x, y, 1).perform(Task(0, 0, 0, "main", 0, spec, model.init(1)))
    assert ("error" in update.metrics) == ("share_0" in update.metrics) == (kind == "classes")
    assert update.metrics["loss_rms"] > 0
    used = personalise(model, model.init(1), ServingSettings(True, 1), SPEC, x, y)
    assert not torch.equal(used.params, model.init(1))
    assert bool(used.output_bias.any()) == (kind == "classes")


def test_the_compiled_kernel_is_for_cross_entropy():
    assert "cross-entropy over classes only" in compiled_kernel(a_problem("number")[0])
    focal = Objective("focal", "classes", 3, (), huber)
    assert isinstance(compiled_kernel(flat_model("mlp", (5,), 3, (8,), objective=focal)), str)

from dataclasses import replace

import pytest
import torch

from latecomer.core.checks import Checks
from latecomer.core.messages import Task, TrainSpec, Update

TASK = Task(0, 0, 0, "main", 0, TrainSpec(), torch.zeros(4))


def of(device):
    return replace(TASK, device=device)


def update(delta, examples=5, metrics=None, noise=0.0):
    return Update(0, delta, examples, metrics or {}, noise)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (update(torch.zeros(3)), "3 values"),
        (update(torch.zeros(4, dtype=torch.float64)), "float32"),
        (update(torch.zeros(2, 2)), "2 axes"),
        (update(torch.tensor([0.0, float("nan"), 0, 0])), "not finite"),
        (update(torch.tensor([0.0, float("inf"), 0, 0])), "not finite"),
        (update(torch.full((4,), 3e38)), "not finite"),
        (update(torch.zeros(4), examples=0), "num_examples"),
        (update(torch.zeros(4), examples=-3), "num_examples"),
        (update(torch.zeros(4), examples=2.5), "num_examples"),
        (update(torch.zeros(4), metrics={"loss": float("nan")}), "metric"),
        (update(torch.zeros(4), metrics={"loss": "low"}), "metric"),
        (update(torch.zeros(4), noise=float("nan")), "noise_std"),
        (update(torch.zeros(4), noise=-1.0), "noise_std"),
        (update(torch.zeros(4), noise="much"), "noise_std"),
        (update(torch.zeros(4), metrics={"loss": 10**400}), "metric"),
        (update(torch.zeros(4), metrics={"loss": True}), "metric"),
        (Update(0, torch.zeros(4), 5, metrics=None), "metric"),
        (update(torch.zeros(4), examples=True), "num_examples"),
        (update(torch.zeros(4), examples=10**400), "num_examples"),
        (update([0.0, 0.0, 0.0, 0.0]), "delta is a list"),
    ],
)
def test_malformed_updates_are_refused(bad, reason):
    assert reason in Checks().reason_to_refuse(TASK, bad)


def test_norm_bound_is_relative_to_recent_updates():
    checks = Checks(norm_ratio=10, window=5, warmup=3)
    big = update(torch.tensor([100.0, 0, 0, 0]))
    for _ in range(3):
        assert checks.reason_to_refuse(TASK, update(torch.tensor([1.0, 0, 0, 0]))) is None
    assert "exceeds 10" in checks.reason_to_refuse(TASK, big)
    assert checks.reason_to_refuse(TASK, update(torch.tensor([9.9, 0, 0, 0]))) is None


def test_norm_bound_does_not_shrink_as_the_fleet_converges():
    checks = Checks(norm_ratio=10, window=5, warmup=3)
    for norm in [1.0] * 5 + [0.001] * 50:
        assert checks.reason_to_refuse(TASK, update(torch.tensor([norm, 0, 0, 0]))) is None
    late_but_honest = update(torch.tensor([5.0, 0, 0, 0]))
    assert checks.reason_to_refuse(TASK, late_but_honest) is None


def test_one_hostile_device_cannot_walk_the_bound_upwards():
    checks = Checks(norm_ratio=10, window=31, warmup=3)
    for device in range(1, 22):
        checks.reason_to_refuse(of(device), update(torch.tensor([1.0, 0, 0, 0])))
    for _ in range(1000):
        checks.reason_to_refuse(of(0), update(torch.tensor([9.0, 0, 0, 0])))
    assert checks.reason_to_refuse(of(0), update(torch.tensor([11.0, 0, 0, 0]))) is not None


def test_one_busy_device_cannot_keep_the_others_out():
    """It has converged, and has said so a thousand times before anybody else was heard."""
    checks = Checks(norm_ratio=10)
    for _ in range(1000):
        assert checks.reason_to_refuse(of(0), update(torch.tensor([0.001, 0, 0, 0]))) is None
    for turn in range(40):
        honest = update(torch.tensor([5.0, 0, 0, 0]))
        assert checks.reason_to_refuse(of(1 + turn % 3), honest) is None


def test_examples_far_beyond_the_usual_are_refused():
    checks = Checks()
    for turn in range(30):
        assert checks.reason_to_refuse(of(turn % 5), update(torch.ones(4), 50)) is None
    assert checks.reason_to_refuse(of(1), update(torch.ones(4), 5000)) is None
    assert "exceeds 5,000" in checks.reason_to_refuse(of(1), update(torch.ones(4), 5001))
    assert "1 to 100" in Checks(most_examples=100).reason_to_refuse(
        TASK, update(torch.ones(4), 101)
    )
    off = Checks(examples_ratio=0)
    for examples in [5] * 30 + [10**9]:
        assert off.reason_to_refuse(TASK, update(torch.ones(4), examples)) is None


def test_bound_can_be_switched_off_and_state_restored():
    off = Checks(norm_ratio=0)
    on = Checks(norm_ratio=2, warmup=1)
    on.reason_to_refuse(TASK, update(torch.tensor([1.0, 0, 0, 0])))
    twin = Checks(norm_ratio=2, warmup=1)
    twin.restore(on.state())
    huge = update(torch.tensor([1e6, 0, 0, 0]))
    assert off.reason_to_refuse(TASK, huge) is None
    assert twin.reason_to_refuse(TASK, huge) == on.reason_to_refuse(TASK, huge) is not None


def test_a_first_hostile_update_does_not_set_the_bound():
    checks = Checks(norm_ratio=10, window=21, warmup=5)
    assert checks.reason_to_refuse(TASK, update(torch.tensor([2e6, 0, 0, 0]))) is None
    for _ in range(30):
        assert checks.reason_to_refuse(TASK, update(torch.tensor([0.2, 0, 0, 0]))) is None
    assert checks.reason_to_refuse(TASK, update(torch.tensor([1e6, 0, 0, 0]))) is not None

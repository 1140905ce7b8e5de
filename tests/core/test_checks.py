from dataclasses import replace

import pytest
import torch

from latecomer.core.checks import Checks, LargestMedian
from latecomer.core.messages import Offer, Task, TrainSpec, Update

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
        (update(torch.zeros(4), examples=10**9 + 1), "from 1 to 1,000,000,000"),
        (update(torch.zeros(4), metrics={"loss": 1.1e300}), "metric"),
        (update(torch.zeros(4), noise=1.1e6), "from 0 to 1e+06"),
        (Update(0, torch.zeros(4), 5, choice=True), "choice"),
        (Update(0, torch.zeros(4), 5, choice=1), "0 to 0"),
        (Update(0, torch.zeros(4), 5, choice=-1), "choice"),
        (Update(0, torch.zeros(4), 5, epsilon="low"), "epsilon"),
        (Update(0, torch.zeros(4), 5, epsilon=-0.1), "epsilon"),
        (Update(0, torch.zeros(4), 5, epsilon=float("inf")), "epsilon"),
        (Update(0, None, 5, epsilon=float("nan")), "epsilon"),
        (Update(0, torch.zeros(4), 5, last=1), "last"),
    ],
)
def test_malformed_updates_are_refused(bad, reason):
    assert reason in Checks().reason_to_refuse(TASK, bad)


def test_values_at_their_limits_are_accepted():
    smallest = Update(0, torch.zeros(4), 1)
    largest = Update(0, torch.zeros(4), 10**9, {"loss": -1e300}, 1e6, epsilon=1e300, last=True)
    for accepted in (smallest, largest, Update(0, None, 1)):
        assert Checks().reason_to_refuse(TASK, accepted) is None


def test_a_choice_is_the_number_of_a_model_that_was_sent():
    sent = Offer("main", 1, torch.zeros(4))
    task = replace(TASK, offers=(sent,), broadcasts=(None, sent))
    for choice, accepted in enumerate((True, True, False, True, False)):
        reason = Checks().reason_to_refuse(task, Update(0, torch.zeros(4), 5, choice=choice))
        assert (reason is None) is accepted
        assert accepted or "0 to 3" in reason


def test_largest_median_by_hand():
    """The median of the last three values: 2 of 1, 5, 2; 5 of 5, 2, 9; 6 of 2, 9, 6."""
    median = LargestMedian(window=3, warmup=3, votes=1)
    bounds = []
    for device, value in enumerate([1, 5, 2, 9, 6, 0, 0]):
        median.remember(device, value)
        bounds.append(median.bound(0.01))
    unbounded = float("inf")
    assert bounds == pytest.approx([unbounded, unbounded, 0.02, 0.05, 0.06, 0.06, 0.06])


def test_a_median_of_zero_is_no_bound():
    median = LargestMedian(window=3, warmup=1, votes=3)
    for _ in range(3):
        median.remember(0, 0.0)
        assert median.bound(10) == float("inf")


def test_a_device_replaces_its_oldest_value_and_counts_again_after_the_window_dropped_it():
    median = LargestMedian(window=2, warmup=1, votes=1)
    for device, value, bound in [
        (0, 1, 1),
        (0, 2, 2),  # in place of its 1
        (1, 1, 2),
        (2, 1, 2),  # the window drops the 2 of device 0
        (0, 5, 5),  # beside the 1 of device 2; the larger of two is their median
    ]:
        median.remember(device, value)
        assert median.bound(1) == bound


def test_restored_medians_go_on_with_values_and_devices():
    first = LargestMedian(window=3, warmup=2, votes=1)
    first.remember(0, 1)
    first.remember(1, 2)
    second = LargestMedian(window=3, warmup=2, votes=1)
    second.restore(first.state())
    assert second.bound(1) == 2
    second.remember(0, 7)  # in place of its 1
    assert second.bound(1) == 7


def test_default_bounds():
    """20 times the median norm, after 20 updates, of which a device may have made 10."""
    checks = Checks()

    def refused(device, norm):
        return checks.reason_to_refuse(of(device), update(torch.tensor([norm, 0, 0, 0])))

    for _ in range(30):
        assert refused(0, 1.0) is None
    for _ in range(9):
        assert refused(1, 1.0) is None
    assert refused(1, 1000.0) is None  # the twentieth
    assert "exceeds 20 (20 x" in refused(2, 20.01)
    assert refused(2, 20.0) is None


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
    assert "1 to 100" in Checks(max_examples=100).reason_to_refuse(TASK, update(torch.ones(4), 101))
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
